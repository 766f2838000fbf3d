"""What a failed gate says."""

from __future__ import annotations

from loka_serve.evaluation import Interval
from loka_serve.gate import Calibration, GateResult
from loka_serve.probe.choose import Choice
from loka_serve.probe.errors import OutputError
from loka_serve.probe.measure import RecipeError
from loka_serve.probe.report import SiteReport
from loka_serve.probe.statistics import Summary
from loka_serve.report.advice import advice

GATE = GateResult(
    rows=100,
    top_k=50,
    top_1_agreement=0.5,
    top_1_interval=Interval(0.4, 0.6),
    top_k_overlap=0.7,
    top_k_interval=Interval(0.68, 0.72),
    min_top_k_overlap=0.8,
    quality={},
    calibration=Calibration(None, None, 0.0, 0.0),
)


def site(name: str, tensor: float, row: float, block: float, recipe: str = "fp8_tensor") -> SiteReport:
    errors = {"bf16": 0.002, "fp8_tensor": tensor, "fp8_row": row, "fp8_block": block, "int8_row": 0.01}
    return SiteReport(
        name=name,
        kind="linear",
        shape=(64, 64),
        inputs=Summary(10, 1.0, 0.5, 0.0, 1.0),
        weight=Summary(64, 1.0, 0.5, 0.0, 1.0),
        groups=(),
        errors={name: RecipeError(OutputError(size, 30.0, 1.0, 2 * size)) for name, size in errors.items()},
        choice=Choice(recipe, "asked for"),
        weight_bytes=4096,
    )


def test_the_five_costliest_sites_and_what_auto_would_do() -> None:
    sites = [site(f"s{index}", tensor=0.03 + index / 1000, row=0.03, block=0.04) for index in range(6)]
    sites.append(site("outliers", tensor=0.9, row=0.5, block=0.05))
    sites.append(site("hopeless", tensor=0.8, row=0.6, block=0.5))
    lines = advice(sites, GATE, "fp8_tensor")
    assert lines[0] == (
        "gate: top-50 overlap 0.700 (0.680 to 0.720 with 95 % confidence) is below --min-top-k-overlap 0.8"
    )
    assert lines[2] == (
        "  outliers (fp8_tensor, error 0.900): auto would take fp8_block: "
        "fp8_row: floored MERE 1.000 is not below 0.2; fp8_block is within bounds"
    )
    assert lines[3].startswith("  hopeless (fp8_tensor, error 0.800): auto would take bf16: ")
    assert [line.split()[0] for line in lines[2:7]] == ["outliers", "hopeless", "s5", "s4", "s3"]
    assert lines[7].startswith("--recipe auto builds that")


def test_under_auto_itself() -> None:
    lines = advice([site("s", tensor=0.03, row=0.03, block=0.04, recipe="fp8_row")], GATE, "auto")
    assert lines[2] == "  s (fp8_row, error 0.030): auto would keep fp8_row: fp8_row is within bounds"
    assert lines[3].startswith("this is what auto chose")


def test_nothing_quantized() -> None:
    assert "no site is quantized" in advice([site("s", 0.03, 0.03, 0.04, recipe="bf16")], GATE, "bf16")[1]
