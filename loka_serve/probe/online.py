"""Watching a server's traffic: the probe's statistics from one batch in N, cheap enough to stay on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from loka_serve.models.layers import GroupedLinear, Linear
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.site_statistics import SiteStatistics

EVERY = 100
MAX_ROWS = 256
MOST_CALL_ROWS = 4
"""Times `MAX_ROWS` that one call gives where shares count: experts see a beam several times, the context is longer."""


class OnlineProbe:
    """Collects statistics of every site's inputs in sampled batches.

    An engine asks `begin_batch` before each batch. If that says yes it hands each site's input tensor to `observe`, or
    runs the batch inside `watching` where its model is an `OneRecV2`. Nothing that `observe` does waits for a GPU: it
    adds kernels to the current stream, and the figures stay on the device until they are read.

    Not thread-safe: to be called from the thread that runs the engine.

    Args:
        sites: the model's, by name.
        every: one batch in so many is sampled, the first one too.
        max_rows: of a site's rows in a sampled batch at most so many are looked at, evenly spaced; 0: all of them.
        covariance: gather means and covariances too, as synthesis needs; drift needs none.

    Attributes:
        sites: what has been gathered, by site; read it between batches.
        batches, sampled: batches begun, and those of them that were sampled.
    """

    def __init__(
        self,
        sites: Mapping[str, Linear | GroupedLinear],
        every: int = EVERY,
        max_rows: int = MAX_ROWS,
        covariance: bool = False,
    ) -> None:
        if every < 1 or max_rows < 0:
            raise ValueError(f"every {every} and max_rows {max_rows}: expected at least 1 and 0")
        self.every, self.max_rows = every, max_rows
        self.batches = self.sampled = 0
        self._modules, self._covariance = dict(sites), covariance
        self._call_rows = 0
        self.sites = self._empty()

    def begin_batch(self) -> bool:
        """Count a batch; whether it is one to observe."""
        is_sampled = self.batches % self.every == 0
        self.batches += 1
        self.sampled += is_sampled
        return is_sampled

    def observe(self, site: str, rows: Tensor, group_offsets: Tensor | None = None) -> None:
        """Add a site's inputs in a sampled batch.

        Args:
            site: raises KeyError if the model has none of this name.
            rows: [M, in], any float dtype and device; valid rows only (no padding), sorted by group at a grouped site.
            group_offsets: int64 [groups + 1] of a grouped site, on the same device.
        """
        limit = self.max_rows
        if limit and self._call_rows > limit:
            # Of every call the same share: the first level's few rows would else weigh as much as a later one's many.
            limit = min(-(-len(rows) * limit // self._call_rows), MOST_CALL_ROWS * limit)
        self.sites[site].update(rows, group_offsets, limit)

    @contextmanager
    def watching(self, model: OneRecV2, call_rows: int = 0) -> Iterator[bool]:
        """Run one batch of a model inside; gives whether it is observed. The model has no observers afterwards.

        Args:
            call_rows: beams of the whole batch, the rows of a decode step after the first. With it, steps are looked at
                in proportion to their rows, as calibration does; without it, `max_rows` of each.
        """
        if not self.begin_batch():
            yield False
            return
        modules, self._call_rows = model.sites(), call_rows
        for name, module in modules.items():
            module.observer = _Observer(self, name)
        try:
            yield True
        finally:
            self._call_rows = 0
            for module in modules.values():
                module.observer = None

    def take(self) -> dict[str, SiteStatistics]:
        """What has been gathered since the last call, and start anew: a window to compare with calibration."""
        taken, self.sites = self.sites, self._empty()
        return taken

    def merge(self, sites: Mapping[str, SiteStatistics]) -> None:
        """Take in what another worker gathered (`take`, `load_statistics`).

        Raises:
            ValueError: names a site that is unknown or of another shape; nothing is merged then.
        """
        for name, theirs in sites.items():
            if name not in self.sites:
                raise ValueError(f"site {name}: expected one of this model's")
            ours = self.sites[name]
            if (theirs.width, theirs.table.groups, theirs.gaussian is None) != (
                ours.width,
                ours.table.groups,
                ours.gaussian is None,
            ):
                raise ValueError(f"site {name}: its statistics are of another shape")
        for name, theirs in sites.items():
            self.sites[name].merge(theirs)

    def state_bytes(self) -> int:
        """Memory of everything gathered."""
        tables = [site.table.state() for site in self.sites.values()]
        tables += [site.gaussian.state() for site in self.sites.values() if site.gaussian is not None]
        return sum(tensor.nbytes for state in tables for tensor in state.values())

    def _empty(self) -> dict[str, SiteStatistics]:
        return {name: SiteStatistics.of_site(module, self._covariance) for name, module in self._modules.items()}


class _Observer:
    """The observer of one site, of either kind."""

    def __init__(self, probe: OnlineProbe, site: str) -> None:
        self._probe, self._site = probe, site

    def __call__(self, rows: Tensor, group_offsets: Tensor | None = None) -> None:
        self._probe.observe(self._site, rows, group_offsets)
