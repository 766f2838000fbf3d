"""Running calibration histories through the model with an observer at every site."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from loka_serve.engines.base import Engine, EngineRequest, RequestBatch
from loka_serve.errors import QuantizationError
from loka_serve.models.layers import GroupedLinear, Linear
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.sample import GroupRowSample, RowSample
from loka_serve.probe.statistics import GroupStatistics, TensorStatistics

SAMPLE_ROWS = 128
SAMPLE_ROWS_PER_GROUP = 32


class SiteInputs:
    """What the inputs of one site look like: statistics of all rows and a bounded sample of them.

    Attributes:
        statistics: of a site without groups, else None.
        group_statistics: of each group of a grouped site, else None.
    """

    def __init__(self, name: str, module: Linear | GroupedLinear) -> None:
        self.width = module.in_features
        seed = zlib.crc32(name.encode())  # a site's sample does not depend on which other sites there are
        self.statistics: TensorStatistics | None = None
        self.group_statistics: GroupStatistics | None = None
        self._sample: RowSample | GroupRowSample
        if isinstance(module, GroupedLinear):
            self.group_statistics = GroupStatistics(module.groups)
            self._sample = GroupRowSample(module.groups, SAMPLE_ROWS_PER_GROUP, seed)
        else:
            self.statistics = TensorStatistics()
            self._sample = RowSample(SAMPLE_ROWS, seed)

    def observe(self, rows: Tensor) -> None:
        """Observer of a `Linear`: rows [M, in]."""
        assert self.statistics is not None and isinstance(self._sample, RowSample)
        self.statistics.update(rows)
        self._sample.update(rows)

    def observe_groups(self, rows: Tensor, group_offsets: Tensor) -> None:
        """Observer of a `GroupedLinear`: rows [M, in] sorted by group."""
        assert self.group_statistics is not None and isinstance(self._sample, GroupRowSample)
        self.group_statistics.update(rows, group_offsets)
        self._sample.update(rows, group_offsets)

    def total(self) -> TensorStatistics:
        """Statistics of all rows, of whatever group."""
        if self.group_statistics is not None:
            return self.group_statistics.total()
        assert self.statistics is not None
        return self.statistics

    def sample(self) -> tuple[Tensor, Tensor | None]:
        """Sampled rows, float32 [M, in], and for a grouped site their group offsets, int64 [groups + 1]."""
        if isinstance(self._sample, GroupRowSample):
            return self._sample.rows(self.width)
        return self._sample.rows(self.width), None


@contextmanager
def observed(model: OneRecV2) -> Iterator[dict[str, SiteInputs]]:
    """Observe every site of the model inside the `with` block; gives the observations by site, in model order."""
    modules = model.sites()
    inputs = {name: SiteInputs(name, module) for name, module in modules.items()}
    for name, module in modules.items():
        if isinstance(module, GroupedLinear):
            module.observer = inputs[name].observe_groups
        else:
            module.observer = inputs[name].observe
    try:
        yield inputs
    finally:
        for module in modules.values():
            module.observer = None


@torch.inference_mode()
def collect(
    engine: Engine,
    model: OneRecV2,
    requests: Sequence[EngineRequest],
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, SiteInputs]:
    """Recommend for calibration requests and observe the inputs of every site on the way.

    The engine runs the whole constrained beam search, so later levels see the beams that they will see in service.

    Args:
        engine: runs `model` itself.
        progress: called with the number of requests just done.

    Raises:
        QuantizationError: names a site whose inputs were not finite.
    """
    with observed(model) as inputs:
        for start in range(0, len(requests), engine.limits.batch):
            batch = tuple(requests[start : start + engine.limits.batch])
            engine.recommend(RequestBatch(batch))
            progress(len(batch))
    for name, site in inputs.items():
        broken = site.total().non_finite
        if broken:
            raise QuantizationError(
                f"site {name}: {broken} inputs were NaN or infinite in calibration: expected finite activations"
            )
    return inputs
