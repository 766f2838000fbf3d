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
from loka_serve.probe.site_statistics import SiteStatistics

SAMPLE_ROWS = 128
SAMPLE_ROWS_PER_GROUP = 32


class SiteInputs(SiteStatistics):
    """What the inputs of one site look like: statistics of all rows and a bounded sample of them."""

    def __init__(self, name: str, module: Linear | GroupedLinear, covariance: bool = True) -> None:
        groups = module.groups if isinstance(module, GroupedLinear) else None
        super().__init__(module.in_features, groups, covariance)
        seed = zlib.crc32(name.encode())  # a site's sample does not depend on which other sites there are
        self._sample: RowSample | GroupRowSample
        if groups is None:
            self._sample = RowSample(SAMPLE_ROWS, seed)
        else:
            self._sample = GroupRowSample(groups, SAMPLE_ROWS_PER_GROUP, seed)

    def observe(self, rows: Tensor) -> None:
        """Observer of a `Linear`: rows [M, in]."""
        assert isinstance(self._sample, RowSample)
        self.update(rows)
        self._sample.update(rows)

    def observe_groups(self, rows: Tensor, group_offsets: Tensor) -> None:
        """Observer of a `GroupedLinear`: rows [M, in] sorted by group."""
        assert isinstance(self._sample, GroupRowSample)
        self.update(rows, group_offsets)
        self._sample.update(rows, group_offsets)

    def sample(self) -> tuple[Tensor, Tensor | None]:
        """Sampled rows, float32 [M, in], and for a grouped site their group offsets, int64 [groups + 1]."""
        if isinstance(self._sample, GroupRowSample):
            return self._sample.rows(self.width)
        return self._sample.rows(self.width), None


@contextmanager
def observed(model: OneRecV2, covariance: bool = True) -> Iterator[dict[str, SiteInputs]]:
    """Observe every site of the model inside the `with` block; gives the observations by site, in model order.

    Args:
        covariance: gather it too, as synthesis needs.
    """
    modules = model.sites()
    inputs = {name: SiteInputs(name, module, covariance) for name, module in modules.items()}
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
    covariance: bool = True,
) -> dict[str, SiteInputs]:
    """Recommend for calibration requests and observe the inputs of every site on the way.

    The engine runs the whole constrained beam search, so later levels see the beams that they will see in service.

    Args:
        engine: runs `model` itself.
        progress: called with the number of requests just done.
        covariance: see `observed`.

    Raises:
        QuantizationError: names a site whose inputs were not finite.
    """
    with observed(model, covariance) as inputs:
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
