"""Which implementation runs an operation at a shape: measured once on the GPU, then a fixed table.

The table has an entry for each operation, shape, recipe and bucket of rows. An engine holds each weight in one recipe,
so it chooses among that recipe's implementations alone (`Dispatch.choose`). `Dispatch.cells` puts the recipes of a
shape beside each other, for `dispatch_rule.decide` to choose from before anything is quantized.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .dispatch_environment import Environment, libraries_here
from .dispatch_file import EXPERTS, OUT_DTYPES, Entry, Shape, parse
from .dispatch_rule import Candidate, by_time
from .linear.adapters import library_of
from .linear.implementations import default_implementation, implementations_for
from .linear.tilings import TILINGS
from .linear.workload import rank_implementations

if TYPE_CHECKING:
    from .moe.configurations import Configuration

__all__ = ["EXPERTS", "OUT_DTYPES", "Cell", "Dispatch", "Entry", "Environment", "Shape"]

logger = logging.getLogger(__name__)

Cell = tuple[str, int, int, int, int]
"""Operation, n, k, groups and rows: what all recipes of one shape have in common."""


@dataclass(frozen=True)
class Dispatch:
    """The table. Without entries it chooses defaults, and `reason` says why it has none.

    Attributes:
        reason: empty, or why there is no measurement: for a log line and a metric.
        libraries: what was tried: a version each, or why it was absent.
        sites: names of the model's sites by operation, n, k and groups, where they are known.
    """

    device: torch.device
    environment: Environment
    entries: Mapping[Shape, Entry] = field(default_factory=dict)
    reason: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict, compare=False)
    sites: Mapping[tuple[str, int, int, int], str] = field(default_factory=dict, compare=False)

    @classmethod
    def unmeasured(cls, device: torch.device | str, reason: str = "not measured") -> Dispatch:
        """A table of defaults: torch or Triton on CUDA, the reference elsewhere."""
        return cls(torch.device(device), Environment.current(device), {}, reason)

    @classmethod
    def measure(
        cls,
        shapes: Iterable[Shape],
        device: torch.device | str,
        progress: Callable[[int], object] = lambda done: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Dispatch:
        """Times all implementations of these shapes, and their BF16 twins, on this device.

        Args:
            progress: called with the number of shapes just done.
            enough: asked before each shape; once it says so, the others are left out.

        Raises ValueError for an operation or a recipe that does not exist, and for a device without CUDA.
        """
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(f"device: dispatch is measured on a CUDA device, got {device}")
        timed: dict[Shape, Entry] = {}

        def measured(shape: Shape) -> Entry:
            if shape not in timed:
                timed[shape] = _measure(shape, device)
            return timed[shape]

        entries = {}
        for shape in dict.fromkeys(shapes):
            if enough():
                break
            found, twin = measured(shape), measured(shape.in_recipe("bf16"))
            if found.us:
                entries[shape] = Entry(found.us, min(twin.us.values(), default=None), found.mere)
            else:
                logger.warning("dispatch: nothing computes %s; its default stays", shape)
            progress(1)
        return cls(device, Environment.current(device), entries, libraries=libraries_here())

    @classmethod
    def read(cls, path: Path, device: torch.device | str = "cpu") -> Dispatch:
        """A saved table, wherever it was measured, for people and builds to look at.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no table; says where.
        """
        try:
            saved = json.loads(path.read_text())
            environment = Environment(**saved["environment"])
            entries, libraries, sites = parse(saved)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            found = f"field {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} is no dispatch table: {found}") from error
        return cls(torch.device(device), environment, entries, libraries=libraries, sites=sites)

    @classmethod
    def load(cls, path: Path, device: torch.device | str) -> Dispatch:
        """The saved table if it was measured in this environment; otherwise a warning and defaults with a `reason`."""
        environment = Environment.current(device)
        try:
            saved = cls.read(path, device)
        except ValueError as error:
            reason = str(error)
        except OSError as error:
            reason = f"{path} is no dispatch table: {type(error).__name__}: {error}"
        else:
            differences = environment.differences(saved.environment)
            if not differences:
                return saved
            reason = f"{path} was measured elsewhere: {differences}"
        logger.warning("dispatch: %s", reason)
        return cls(torch.device(device), environment, {}, reason)

    def text(self) -> str:
        """The table as JSON."""
        content = {
            "environment": asdict(self.environment),
            "libraries": dict(self.libraries),
            "sites": [
                {"site": name, "op": op, "n": n, "k": k, "groups": groups}
                for (op, n, k, groups), name in self.sites.items()
            ],
            "entries": [{"shape": asdict(shape), **asdict(entry)} for shape, entry in sorted(self.entries.items())],
        }
        return json.dumps(content, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Writes the table as JSON, so that a reader never sees half of it."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text(self.text())
        partial.replace(path)

    def covers(self, shapes: Iterable[Shape]) -> bool:
        """Whether each of these shapes was measured."""
        return all(shape in self.entries for shape in shapes)

    def cells(self) -> dict[Cell, list[Candidate]]:
        """All recipes and implementations of each shape and bucket of rows, fastest first; cells in ascending order."""
        found: dict[Cell, list[Candidate]] = {}
        for shape, entry in self.entries.items():
            candidates = found.setdefault((shape.op, shape.n, shape.k, shape.groups, shape.rows), [])
            for name, us in entry.us.items():
                library = _libraries_of_experts(name) if shape.op == EXPERTS else library_of(name)
                candidates.append(Candidate(name, library, shape.recipe, us, entry.mere.get(name)))
        return {cell: sorted(found[cell], key=by_time) for cell in sorted(found)}

    def entry(self, op: str, recipe: str, n: int, k: int, rows: int, groups: int = 1) -> Entry | None:
        """The entry that decides for so many rows: of the smallest bucket that holds them, else of the largest."""
        key = (op, recipe, n, k, groups)
        buckets = {it.rows: it for it in self.entries if (it.op, it.recipe, it.n, it.k, it.groups) == key}
        if not buckets:
            return None
        bucket = min((size for size in buckets if size >= rows), default=max(buckets))
        return self.entries[buckets[bucket]]

    def choose(self, op: str, recipe: str, n: int, k: int, rows: int) -> str:
        """The implementation to run; a name for `linear.implementations.linear`. For build and capture time.

        Raises ValueError for an operation or a recipe that does not exist.
        """
        out_dtype = _out_dtype(op)
        default = default_implementation(recipe, rows, n, k, self.device, out_dtype)
        entry = self.entry(op, recipe, n, k, rows)
        if entry is None:
            return default
        # Tilings compute any number of rows; of the libraries, some take what the bucket has but not these rows.
        usable = implementations_for(recipe, rows, n, k, self.device, out_dtype)
        return next((name for name in entry.us if name in usable or name in TILINGS), default)

    def choose_experts(self, recipe: str, n: int, k: int, groups: int, tokens: int) -> Configuration | None:
        """What runs experts of width n and input width k; None, for their own table, where nothing was measured."""
        entry = self.entry(EXPERTS, recipe, n, k, tokens, groups)
        if entry is None:
            return None
        from .moe.measure import configurations_of  # needs Triton, which a table does not

        known = configurations_of(recipe)
        return next((known[name] for name in entry.us if name in known), None)


def _libraries_of_experts(name: str) -> str:
    """Of a configuration as `moe.measure.configuration_name` writes it, in the order of its GEMMs."""
    kinds = {"WarpSpecialized": "cuda", "DeepGemm": "deep_gemm"}
    return "+".join(dict.fromkeys(kinds.get(part.partition("(")[0], "triton") for part in name.split(" + ")))


def _measure(shape: Shape, device: torch.device) -> Entry:
    """What computes a shape, fastest first; `bf16_us` is left open."""
    if shape.op == EXPERTS:
        from .moe.measure import rank_configurations  # needs Triton

        timings = rank_configurations(shape, device)
    else:
        arguments = shape.recipe, shape.rows, shape.n, shape.k, device, _out_dtype(shape.op)
        timings = rank_implementations(implementations_for(*arguments), *arguments)
    us = {timing.implementation: round(timing.us, 3) for timing in timings}
    return Entry(us, None, {it.implementation: round(it.mere, 6) for it in timings if it.mere == it.mere})


def _out_dtype(op: str) -> torch.dtype:
    if op not in OUT_DTYPES:
        raise ValueError(f"op: expected one of {', '.join(OUT_DTYPES)}, got {op!r}")
    return OUT_DTYPES[op]
