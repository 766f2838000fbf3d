"""Measures some households again and compares with results.json: do checkpoint, data and results belong together?

python -m examples.groceries.spot_check --data DATA [--households 60] [--bundle BUNDLE] [--device cpu]

Exits 1 where a figure is further from the committed one than the sample's noise explains. With --bundle the bundle is
measured, which should be as near.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.groceries.batches import ANY_ORDER, PRODUCT_NUMBER_ORDER
from examples.groceries.command_line import positive, run_command_line, usable_device
from examples.groceries.evaluate import CHECKPOINT, RESULTS, Source, checkpoint_digest, load_source, recommend_part
from examples.groceries.metrics import TOP
from examples.groceries.purchases import GroceriesError
from examples.groceries.scoring import Recommendations

TOLERATED_ERRORS = 4.0  # standard errors


@dataclass(frozen=True)
class Comparison:
    """HR@10 of a sample with its standard error, beside the committed figure."""

    measure: str
    households: int
    positions: int
    measured: float
    standard_error: float
    committed: float

    @property
    def agrees(self) -> bool:
        """Whether noise explains the difference."""
        return abs(self.measured - self.committed) <= TOLERATED_ERRORS * self.standard_error

    def __str__(self) -> str:
        return (
            f"{self.measure}: HR@10 {self.measured:.4f} +- {self.standard_error:.4f} at {self.positions} positions of "
            f"{self.households} households, {self.committed:.4f} in the results: "
            + ("agrees" if self.agrees else "DIFFERS")
        )


def compare(measure: str, recommended: Recommendations, committed: float) -> Comparison:
    """The positions of one basket are not independent, so that the error is that of whole households."""
    hits = (recommended.ranks() < TOP).astype(float)
    by_household = np.bincount(recommended.households, hits - hits.mean())
    # A handful of households may by chance be alike: independent positions give the least error to expect.
    least = np.sqrt(committed * (1.0 - committed) / len(hits))
    error = max(float(np.sqrt((by_household**2).sum()) / len(hits)), float(least))
    households = len(np.unique(recommended.households))
    return Comparison(measure, households, len(hits), float(hits.mean()), error, committed)


def spot_check(source: Source, results: dict[str, Any], households: int) -> list[Comparison]:
    """Next item in both orders on about that many households, evenly spread; source: a checkpoint or a bundle.

    Raises:
        GroceriesError: the results are those of another checkpoint.
    """
    expected = results["environment"]["checkpoint"]
    if not source.is_bundle and (digest := checkpoint_digest(source.model)) != expected:
        raise GroceriesError(f"{source.model}: its weights have the digest {digest}, the results are of {expected}")
    parts = max(1, len(load_source(source)[0].household_ids) // households)
    ours, beam = results["ours"], results["environment"]["beam_width"]
    return [
        compare(name, recommend_part(source, mode, beam, True, parts // 2, parts), committed)
        for name, mode, committed in (
            ("product-number order", PRODUCT_NUMBER_ORDER, ours["hr@10"]),
            ("random order", ANY_ORDER, ours["random_order"]["hr@10"]),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--bundle", type=Path, help="measure this bundle of the checkpoint instead")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--households", type=positive, default=60)
    parser.add_argument("--device", type=usable_device, default="cpu")
    arguments = parser.parse_args()
    source = Source(
        arguments.data, arguments.bundle or arguments.checkpoint, arguments.bundle is not None, arguments.device
    )
    comparisons = spot_check(source, json.loads(arguments.results.read_text()), arguments.households)
    for comparison in comparisons:
        print(comparison)
    if not all(comparison.agrees for comparison in comparisons):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command_line(main)
