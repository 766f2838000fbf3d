"""The guard of one model: samples batches, judges every site, puts drifted ones into BF16 and calm ones back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loka_serve.drift.options import DriftOptions
from loka_serve.drift.window import Inputs, Window
from loka_serve.engines.base import RequestBatch, SiteDrift
from loka_serve.errors import BundleError
from loka_serve.models.layers import GroupedLinear, Linear
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.probe.online import OnlineProbe
from loka_serve.quantization.methods import SiteMethod
from loka_serve.quantization.recipes import RECIPES

logger = logging.getLogger(__name__)


def read_baselines(probe: Mapping[str, Any]) -> dict[str, Inputs]:
    """Calibration's inputs by site from the content of ``probe.json``; a site without a histogram is left out.

    Raises:
        BundleError: names the site and field that is not as the build writes it.
    """
    baselines = {}
    try:
        for site in probe["sites"]:
            name, inputs = site["name"], site["inputs"]
            if inputs.get("octaves"):
                baselines[name] = Inputs.from_summary(inputs["octaves"], inputs["absmax"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleError(f'probe.json: "sites": expected name, inputs.octaves and inputs.absmax: {error!r}') from error
    return baselines


@dataclass
class _GuardedSite:
    """A site, its window, and the method that the bundle gave it, while another one runs in its place."""

    module: Linear | GroupedLinear
    window: Window
    quantized: SiteMethod | None = None

    @property
    def can_fall_back(self) -> bool:
        return isinstance(self.module.method, SiteMethod) and self.module.method.recipe.name != "bf16"


class DriftGuard:
    """Watches the inputs of every site of a model that calibration has seen.

    A site has drifted if its population stability index or its largest input is beyond the limits, over a full window.
    A quantized one then computes in BF16: its inputs are no longer rounded to the format that they drifted out of, and
    its weight is the dequantized one, as a bundle holds no other. It goes back to its recipe by itself, once a window
    without any batch from before the fallback is within half the limits.

    Not thread-safe: to be called from the thread that runs the engine.

    Args:
        model: with its sites' methods in place; they are exchanged in it.
        baselines: calibration's inputs by site (`read_baselines`); other sites are not watched.

    Attributes:
        sites: names of the watched sites.
    """

    def __init__(self, model: OneRecV2, baselines: Mapping[str, Inputs], options: DriftOptions) -> None:
        self._model, self._options = model, options
        modules = {name: module for name, module in model.sites().items() if name in baselines}
        self._sites = {
            name: _GuardedSite(module, Window(baselines[name], options.window)) for name, module in modules.items()
        }
        self.sites = tuple(self._sites)
        self._probe = OnlineProbe(model.sites(), options.sample_every)
        self._has_news = False

    @contextmanager
    def watching(self, batch: RequestBatch) -> Iterator[None]:
        """Run a batch inside. One in `sample_every` is looked at, unless it fails."""
        beams = len(batch) * max((request.beam_width for request in batch.requests), default=0)
        with self._probe.watching(self._model, beams) as is_sampled:
            try:
                yield
            except BaseException:
                self._probe.take()
                raise
        if not is_sampled:
            return
        for name, statistics in self._probe.take().items():
            if name in self._sites:
                self._sites[name].window.add(Inputs.from_statistics(statistics, len(batch)))
        self._has_news = True

    def judge(self) -> list[SiteDrift] | None:
        """Judge every site and act on it; None if no batch was sampled since the last time."""
        if not self._has_news:
            return None
        self._has_news = False
        return [self._judge(name, site) for name, site in self._sites.items()]

    def _judge(self, name: str, site: _GuardedSite) -> SiteDrift:
        if not site.window.is_full:
            return SiteDrift(name, None, None, site.quantized is not None)
        psi, ratio = site.window.stability_index(), site.window.amax_ratio()
        options, falls = self._options, False
        if site.quantized is None:
            falls = site.can_fall_back and (psi > options.psi_limit or ratio > options.amax_ratio)
            if falls:
                _fall_back(site)
                logger.warning(
                    "site %s drifted and runs in BF16: stability index %.3g (limit %g), amax %.3g of calibration's "
                    "(limit %g)", name, psi, options.psi_limit, ratio, options.amax_ratio,
                )  # fmt: skip
        elif psi <= options.calm_psi and ratio <= options.calm_amax_ratio:
            site.module.method, site.quantized = site.quantized, None
            logger.warning(
                "site %s is calm and runs its recipe again: stability index %.3g, amax %.3g of calibration's",
                name, psi, ratio,
            )  # fmt: skip
        return SiteDrift(name, psi, ratio, site.quantized is not None, falls)


def _fall_back(site: _GuardedSite) -> None:
    method = site.module.method
    assert isinstance(method, SiteMethod)
    weight = method.dequantized_weight().bfloat16()
    # As the site was kept: a float32 copy for speed, or what is stored.
    keeps_copy = "weight" not in method.state
    fallback = RECIPES["bf16"].prepare({"weight": weight}, weight.device, keeps_copy)
    site.module.method, site.quantized = fallback, method
    site.window.clear()
