"""Every recipe on the held-out histories of a trained model, in one table, as `python -m loka_serve.build --compare`.

python -m benchmarks.comparison --checkpoint DIR --catalog FILE --calibration FILE --out FILE [--rows 500]

Writes the bundle's comparison.json with what it was measured on and with. The bundles are thrown away.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_environment
from loka_serve.build import BuildOutcome, build
from loka_serve.build_config import BuildConfig
from loka_serve.command_line import (
    CommandParser,
    existing_file,
    not_negative,
    output_file,
    positive,
    run_command_line,
    usable_device,
)
from loka_serve.compare import format_comparison

RELATIVE_TO = "recall@10"


def describe(outcome: BuildOutcome) -> dict[str, Any]:
    """The comparison, the sites by recipe of `auto`, and its Recall@10's relative change (None where BF16's is 0)."""
    recipes = [site.choice.recipe for site in outcome.sites]
    quality = outcome.gate.quality.get(RELATIVE_TO)
    return {
        "auto": {
            "sites_by_recipe": {recipe: recipes.count(recipe) for recipe in sorted(set(recipes))},
            f"{RELATIVE_TO}_relative_change": quality.quantized / quality.bf16 - 1.0
            if quality and quality.bf16
            else None,
            "mods": outcome.mods.to_dict(),
        },
        "held_out_histories": outcome.gate.rows,
        "comparison": outcome.comparison,
    }


def compare(config: BuildConfig) -> dict[str, Any]:
    """Builds with every recipe; see `describe`."""
    outcome = build(config)
    assert outcome.comparison is not None
    print(format_comparison(outcome.comparison))
    return describe(outcome)


def digest(checkpoint: Path) -> str:
    """First 16 hex digits of the SHA-256 of the weight files, in the order of their names."""
    content = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        content.update(path.read_bytes())
    return content.hexdigest()[:16]


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--catalog", type=existing_file, required=True)
    parser.add_argument("--calibration", type=existing_file, required=True, help="histories with their targets")
    parser.add_argument("--rows", type=positive, default=500, help="held-out histories")
    parser.add_argument("--calibration-rows", type=positive, default=128)
    parser.add_argument("--batch", type=positive, default=8, help="histories that run together")
    parser.add_argument("--seed", type=not_negative, default=0)
    parser.add_argument("--device", type=usable_device, default="cpu")
    parser.add_argument("--cpu-threads", type=not_negative, default=0, help="0 leaves one core free")
    parser.add_argument("--commit", help="where git is not at hand")
    parser.add_argument("--out", type=output_file, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = compare(
            BuildConfig(
                checkpoint=arguments.checkpoint,
                catalog=arguments.catalog,
                calibration=arguments.calibration,
                out=Path(folder) / "bundle",
                calibration_rows=arguments.calibration_rows,
                gate_rows=arguments.rows,
                min_top_k_overlap=0.0,
                compare=True,
                batch=arguments.batch,
                seed=arguments.seed,
                device=arguments.device,
                cpu_threads=arguments.cpu_threads,
                quiet=True,
            )
        )
    measured = {
        "checkpoint": digest(arguments.checkpoint),
        **measured,
        "environment": describe_environment(arguments.commit),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    run_command_line(main)
