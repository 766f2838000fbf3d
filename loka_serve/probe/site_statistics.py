"""All that the probe keeps of a site's inputs, how it merges, and how it is saved: no row is among it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from loka_serve.errors import ProbeError
from loka_serve.models.layers import GroupedLinear, Linear
from loka_serve.probe.activations import GaussianEstimate
from loka_serve.probe.statistics import GroupStatistics, TensorStatistics
from loka_serve.probe.statistics_table import StatisticsTable, group_of_rows

FORMAT = "loka-probe-statistics"
FORMAT_VERSION = 1
COVARIANCE_ROWS = 512
"""Rows of one update that a covariance takes at most, evenly spaced."""


class SiteStatistics:
    """Statistics of the inputs of one site.

    Attributes:
        width: input features.
        statistics: of a site without groups, else None.
        group_statistics: of each group of a grouped site, else None.
        gaussian: mean and covariance, from at most 512 rows of each update; None if not asked for.
    """

    def __init__(self, width: int, groups: int | None = None, covariance: bool = True) -> None:
        self.width = width
        self.statistics = TensorStatistics() if groups is None else None
        self.group_statistics = None if groups is None else GroupStatistics(groups)
        self.gaussian = GaussianEstimate(width, groups or 1) if covariance else None

    @classmethod
    def of_site(cls, module: Linear | GroupedLinear, covariance: bool = True) -> SiteStatistics:
        """Empty statistics that fit a site."""
        return cls(module.in_features, module.groups if isinstance(module, GroupedLinear) else None, covariance)

    def update(self, rows: Tensor, group_offsets: Tensor | None = None, max_rows: int | None = None) -> None:
        """Add rows; does not wait for a GPU.

        Args:
            rows: [M, width], any float dtype and device; those of a grouped site sorted by group.
            group_offsets: int64 [groups + 1] of a grouped site, on the same device.
            max_rows: look at no more than so many of them, evenly spaced.
        """
        if not len(rows):
            return
        groups = None if group_offsets is None else group_of_rows(group_offsets, len(rows))
        rows, groups = _spaced(rows, groups, max_rows)
        self.table.update(rows, groups)
        if self.gaussian is not None:
            # The statistics see rare values in all rows; a covariance is as good from some of them.
            self.gaussian.update(*_spaced(rows, groups, COVARIANCE_ROWS))

    def merge(self, other: SiteStatistics) -> None:
        """Take in another part of the stream; raises ValueError if it is of a site of another shape."""
        if (other.width, other.table.groups) != (self.width, self.table.groups):
            raise ValueError(
                f"{other.table.groups} groups of {other.width} inputs: expected {self.table.groups} of {self.width}"
            )
        if (other.gaussian is None) != (self.gaussian is None):
            raise ValueError("one has covariances and the other none: expected both or neither")
        self.table.merge(other.table)
        if self.gaussian is not None and other.gaussian is not None:
            self.gaussian.merge(other.gaussian)

    def total(self) -> TensorStatistics:
        """Statistics of all rows, of whatever group."""
        if self.group_statistics is not None:
            return self.group_statistics.total()
        assert self.statistics is not None
        return self.statistics

    @property
    def table(self) -> StatisticsTable:
        """The statistics by group; of one group for a site without."""
        found = self.group_statistics or self.statistics
        assert found is not None
        return found.table

    @property
    def is_grouped(self) -> bool:
        return self.group_statistics is not None


def _spaced(rows: Tensor, groups: Tensor | None, limit: int | None) -> tuple[Tensor, Tensor | None]:
    step = -(-len(rows) // limit) if limit else 1
    return rows[::step], None if groups is None else groups[::step]


def save_statistics(sites: Mapping[str, SiteStatistics], path: Path) -> None:
    """Write ``path`` + ``.safetensors`` (all tensors, ``{site}/{part}.{name}``) and ``.json`` (the shapes).

    The JSON file comes last: where it is, the other one is whole.
    """
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, Any] = {}
    for name, site in sites.items():
        groups = site.table.groups if site.is_grouped else None
        shapes[name] = {"width": site.width, "groups": groups, "covariance": site.gaussian is not None}
        parts = {"values": site.table.state()} | ({"gaussian": site.gaussian.state()} if site.gaussian else {})
        for part, state in parts.items():
            tensors |= {f"{name}/{part}.{key}": tensor.cpu().contiguous() for key, tensor in state.items()}
    description = _file(path, ".json")
    description.unlink(missing_ok=True)
    save_file(tensors, _file(path, ".safetensors"))
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "sites": shapes}
    description.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_statistics(path: Path) -> dict[str, SiteStatistics]:
    """Read what `save_statistics` wrote to the same path.

    Raises:
        ProbeError: names the file that is missing or damaged, and the site if one is at fault.
    """
    description, data = _file(path, ".json"), _file(path, ".safetensors")
    try:
        content = json.loads(description.read_text(encoding="utf-8"))
        if (content["format"], content["format_version"]) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"format {content['format']} {content['format_version']}")
        shapes = {
            str(name): (int(shape["width"]), shape["groups"], bool(shape["covariance"]))
            for name, shape in content["sites"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeError(f"{description}: expected {FORMAT} {FORMAT_VERSION}, found {error!r}") from error
    try:
        tensors = load_file(data)
    except (OSError, SafetensorError) as error:
        raise ProbeError(f"{data}: not a readable safetensors file: {error}") from error
    sites = {}
    for name, shape in shapes.items():
        try:
            sites[name] = _from_tensors(name, tensors, *shape)
        except ValueError as error:
            raise ProbeError(f"{data}: site {name}: {error}") from error
    return sites


def _from_tensors(
    name: str, tensors: Mapping[str, Tensor], width: int, groups: int | None, covariance: bool
) -> SiteStatistics:
    site = SiteStatistics(width, groups, covariance)
    table = StatisticsTable.from_state(_part(name, "values", tensors))
    if table.groups != (groups or 1):
        raise ValueError(f"values of {table.groups} groups: expected {groups or 1}")
    if site.group_statistics is not None:
        site.group_statistics = GroupStatistics(table.groups, table)
    else:
        site.statistics = TensorStatistics(table)
    if site.gaussian is not None:
        found = GaussianEstimate.from_state(_part(name, "gaussian", tensors))
        if found.mean.shape != site.gaussian.mean.shape:
            raise ValueError(f"gaussian of {list(found.mean.shape)}: expected {list(site.gaussian.mean.shape)}")
        site.gaussian = found
    return site


def _part(site: str, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{site}/{part}."
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _file(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
