"""An engine under the drift guard."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from loka_serve.catalog.catalog import Catalog
from loka_serve.drift.guard import DriftGuard, read_baselines
from loka_serve.drift.options import DriftOptions
from loka_serve.engines.base import BeamResult, Engine, RequestBatch, SiteDrift
from loka_serve.engines.reference import ReferenceEngine

logger = logging.getLogger(__name__)


class GuardedEngine:
    """The reference engine, its model watched while it recommends; see `DriftGuard`."""

    def __init__(self, engine: ReferenceEngine, guard: DriftGuard) -> None:
        self._engine, self._guard = engine, guard
        self.name, self.limits = engine.name, engine.limits

    @property
    def drift_sites(self) -> tuple[str, ...]:
        return self._guard.sites

    def recommend(self, batch: RequestBatch) -> BeamResult:
        with self._guard.watching(batch):
            return self._engine.recommend(batch)

    def judge_drift(self) -> list[SiteDrift] | None:
        return self._guard.judge()

    def warmup(self) -> None:
        """Not watched: its requests are nobody's."""
        self._engine.warmup()

    def swap_catalog(self, catalog: Catalog) -> None:
        self._engine.swap_catalog(catalog)


def guarded(engine: Engine, probe: Mapping[str, Any], options: DriftOptions) -> Engine:
    """The engine under guard, or as it is where there can be none, which is logged.

    Args:
        probe: content of the bundle's ``probe.json``.

    Raises:
        BundleError: names what is not as expected in `probe`.
    """
    if not options.sample_every:
        return engine
    if not isinstance(engine, ReferenceEngine):
        logger.info("no drift guard: it watches the reference engine alone, not %s", engine.name)
        return engine
    baselines = read_baselines(probe)
    if missing := sorted(set(engine.model.sites()) - set(baselines)):
        logger.warning(
            "no drift guard for %d sites (%s, ...): the bundle has no histogram of their inputs; build it again",
            len(missing), missing[0],
        )  # fmt: skip
    return GuardedEngine(engine, DriftGuard(engine.model, baselines, options))
