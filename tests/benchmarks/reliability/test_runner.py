"""The runner: what counts as held, and which rows a run replaces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.reliability import __main__ as runner
from benchmarks.reliability.case import Case, Figure, Setting


@pytest.mark.parametrize(
    ("figure", "held"),
    [
        (Figure("a", 1.0), True),
        (Figure("a", None), True),
        (Figure("a", 1.0, most=1.0), True),
        (Figure("a", 1.01, most=1.0), False),
        (Figure("a", 0.99, least=1.0), False),
        (Figure("a", None, most=1.0), False),
        (Figure("a", float("nan"), most=1.0), False),
        (Figure("a", float("nan"), least=1.0), False),
    ],
)
def test_a_figure_is_held_within_its_bar(figure: Figure, held: bool) -> None:
    assert figure.held is held


def test_a_case_without_figures_or_with_an_error_is_not_held(tmp_path: Path) -> None:
    def broken(setting: Setting) -> list[Figure]:
        raise RuntimeError("the server went away\nand more")

    row = runner.run_case(Case("broken", "breaks", broken), False, tmp_path)
    assert (row["held"], row["error"], row["figures"]) == (False, "RuntimeError: the server went away", [])
    assert not runner.run_case(Case("empty", "measures nothing", lambda setting: []), False, tmp_path)["held"]


def test_a_run_replaces_its_own_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def case(name: str, value: float, slow: bool = False) -> Case:
        return Case(name, name, lambda setting: [Figure("lost", value, most=0)], slow)

    out = tmp_path / "reliability.json"
    out.write_text(json.dumps({"rows": [{"case": name, "held": None} for name in ("gone", "second", "long")]}))
    cases = {"first": case("first", 0), "second": case("second", 3), "long": case("long", 0, slow=True)}
    monkeypatch.setattr(runner, "find_cases", lambda: cases)
    monkeypatch.setattr("sys.argv", ["reliability", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runner.main()
    assert ended.value.code == 1  # the second one is not held
    rows = {row["case"]: row["held"] for row in json.loads(out.read_text())["rows"]}
    assert rows == {"first": True, "second": False, "long": None}
    assert "NOT HELD  second" in capsys.readouterr().out


def test_all_cases_have_names_of_their_own_and_a_title() -> None:
    cases = runner.find_cases()
    assert "soak" in cases and cases["soak"].slow
    assert all(case.title and name == case.name and name.islower() for name, case in cases.items())
