"""A dispatch table as people read it: one row for each site and number of rows, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loka_serve.bundle import DISPATCH_FILE
from loka_serve.errors import LokaError
from loka_serve.kernels.dispatch import Cell, Dispatch
from loka_serve.kernels.dispatch_rule import BASELINE, Candidate, Decision, by_time, decide

COLUMNS = ("site", "rows", "choice", "library", "recipe", "us", "bf16_us", "mere", "runner_up")


class DispatchError(LokaError):
    """A dispatch table that cannot be read or measured; the message names the file or the argument."""


@dataclass(frozen=True)
class Row:
    """What runs a site at so many rows.

    Attributes:
        choice: the implementation.
        us, bf16_us: microseconds of the choice, and of the fastest BF16 one.
        mere: floored MERE of the choice; None where it was not measured.
        runner_up: the fastest other one that might have been chosen, as "implementation recipe us".
    """

    site: str
    rows: int
    choice: str
    library: str
    recipe: str
    us: float
    bf16_us: float | None
    mere: float | None
    runner_up: str | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def read_table(path: Path) -> Dispatch:
    """The table of a file or of a bundle, wherever it was measured.

    Raises:
        DispatchError: names the file that is missing or no dispatch table.
    """
    file = path / DISPATCH_FILE if path.is_dir() else path
    try:
        return Dispatch.read(file)
    except OSError as error:
        raise DispatchError(f"{file}: {error.strerror}: expected a dispatch table") from error
    except ValueError as error:
        raise DispatchError(str(error)) from error


def keep_table(bundle: Path, table: Dispatch | None) -> None:
    """Write a table, if there is one, among the files of a bundle that is being built."""
    if table is not None:
        table.save(bundle / DISPATCH_FILE)


def rows_of(table: Dispatch) -> list[Row]:
    """The rule's decision in every cell of the table, by operation, shape and number of rows."""
    return [row_of(table, cell, candidates) for cell, candidates in table.cells().items()]


def row_of(table: Dispatch, cell: Cell, candidates: Sequence[Candidate]) -> Row:
    """The rule's decision in one cell; among the implementations of its recipe where only one recipe was measured."""
    op, n, k, groups, rows = cell
    decision = _decide(table, cell, candidates)
    choice, other = decision.choice, decision.runner_up
    return Row(
        site=table.sites.get((op, n, k, groups)) or f"{op} [{n}, {k}]" + (f" x {groups}" if groups > 1 else ""),
        rows=rows,
        choice=choice.implementation,
        library=choice.library,
        recipe=choice.recipe,
        us=choice.us,
        bf16_us=decision.bf16_us,
        mere=choice.mere,
        runner_up=None if other is None else f"{other.implementation} {other.recipe} {other.us:g}",
        reason=decision.reason,
    )


def _decide(table: Dispatch, cell: Cell, candidates: Sequence[Candidate]) -> Decision:
    recipes = {candidate.recipe for candidate in candidates}
    if BASELINE in recipes:
        return decide(candidates)
    op, n, k, groups, rows = cell
    fastest = min(candidates, key=by_time)
    others = [candidate for candidate in candidates if candidate is not fastest and candidate.recipe == fastest.recipe]
    entry = table.entry(op, fastest.recipe, n, k, rows, groups)
    bf16_us = None if entry is None else entry.bf16_us
    runner_up = min(others, key=by_time, default=None)
    return Decision(fastest, bf16_us, runner_up, "the weights are in this recipe")


def format_rows(table: Dispatch) -> str:
    """The rows as a text table, under what they hold for."""
    environment = ", ".join(f"{name} {value}" for name, value in asdict(table.environment).items() if value is not None)
    libraries = [f"  {name}: {version}" for name, version in table.libraries.items()]
    cells = [[_text(getattr(row, column)) for column in COLUMNS] for row in rows_of(table)]
    widths = [max(len(line[index]) for line in [list(COLUMNS), *cells]) for index in range(len(COLUMNS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    heading = "  ".join(name.ljust(width) for name, width in zip(COLUMNS, widths, strict=True)).rstrip()
    return "\n".join([f"measured with {environment}", *libraries, heading, *lines])


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
