"""What a case is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """One thing that was measured, beside its bar.

    Attributes:
        name: what it is, for the table: "goodput, of that at 1x".
        value: the figure; None if there was nothing to measure, which holds no bar.
        unit: "ms", "MiB/min", "%", or empty.
        least, most: the bar; a figure with neither is shown and not judged.
    """

    name: str
    value: float | None
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def held(self) -> bool:
        """Whether the figure is within its bar; NaN never is."""
        if self.least is None and self.most is None:
            return True
        if self.value is None:
            return False
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclass(frozen=True)
class Setting:
    """How a case is run.

    Attributes:
        quick: a few seconds, for the tests: fewer requests, the same judgement.
        scratch: an empty folder of the case's own.
        work_dir: where the groceries' data and bundle are, or are to be made.
    """

    quick: bool
    scratch: Path
    work_dir: Path


@dataclass(frozen=True)
class Case:
    """A promise and the function that puts it to the test.

    Attributes:
        name: for `--only`, in lower case with underscores.
        title: what happens, for the table: "3x capacity for 60 s".
        run: measures; an exception counts as a promise that was not held.
        slow: left out unless it is named, or `--slow` is given (the soak).
        quick: whether the tests run it, in its quick form.
    """

    name: str
    title: str
    run: Callable[[Setting], list[Figure]]
    slow: bool = False
    quick: bool = True
