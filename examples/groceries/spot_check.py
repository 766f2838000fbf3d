"""Measures some households again and compares with results.json: do checkpoint, data and results belong together?

python -m examples.groceries.spot_check --data DATA [--households 60] [--bundle BUNDLE] [--device cpu]

Exits 1 where a figure is further from the committed one than the sample's noise explains, 2 where something is wrong
with its input. With --bundle that bundle of the checkpoint is measured, which should be as near.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.groceries.batches import ANY_ORDER, PRODUCT_NUMBER_ORDER
from examples.groceries.evaluate import CHECKPOINT, RESULTS, Source, checkpoint_digest, load_source, recommend_part
from examples.groceries.metrics import TOP
from examples.groceries.prepare import load_sequences
from examples.groceries.purchases import GroceriesError
from examples.groceries.records import Committed, check_version
from examples.groceries.scoring import Recommendations
from loka_serve.command_line import CommandParser, positive, run_command_line, usable_device

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


def spot_check(source: Source, checkpoint: Path, committed: Committed, households: int) -> list[Comparison]:
    """Next item in both orders on about that many households, evenly spread; source: the checkpoint, or its bundle.

    Raises:
        GroceriesError: the results are those of another checkpoint, or the data has other semantic IDs.
    """
    if (digest := checkpoint_digest(checkpoint)) != committed.checkpoint:
        raise GroceriesError(
            f"{checkpoint}: its weights have the digest {digest}, the results are of {committed.checkpoint}"
        )
    check_version(checkpoint, load_sequences(source.data))
    parts = max(1, len(load_source(source)[0].household_ids) // households)
    return [
        compare(name, recommend_part(source, mode, committed.beam, True, parts // 2, parts), figure)
        for name, mode, figure in (
            ("product-number order", PRODUCT_NUMBER_ORDER, committed.product_number),
            ("random order", ANY_ORDER, committed.random),
        )
    ]


def main() -> None:
    parser = CommandParser(__doc__)
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
    comparisons = spot_check(source, arguments.checkpoint, Committed.read(arguments.results), arguments.households)
    for comparison in comparisons:
        print(comparison)
    if not all(comparison.agrees for comparison in comparisons):
        raise SystemExit(1)


if __name__ == "__main__":
    run_command_line(main)
