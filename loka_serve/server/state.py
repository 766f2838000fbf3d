"""What one server is made of, put together once and handed to every route."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loka_serve.bundle import Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.config import DEFAULT_DELAY_MS, LEAST_BEAM_LIMIT, ServerConfig
from loka_serve.errors import ConfigError
from loka_serve.server.access import Access
from loka_serve.server.api_keys import ApiKeys
from loka_serve.server.batcher import RETRY_SECONDS, Batcher, BatchSettings
from loka_serve.server.catalogs import CatalogStore
from loka_serve.server.engine_client import EngineClient
from loka_serve.server.engine_connection import EngineSettings
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import UNAVAILABLE, ProblemError
from loka_serve.server.resolution import ServedModel
from loka_serve.server.summary import Window
from loka_serve.serving import read_serving

if TYPE_CHECKING:
    from loka_serve.server.tracing import Tracing

logger = logging.getLogger(__name__)


@dataclass
class ServerState:
    """The parts of a running server.

    Attributes:
        draining: true from SIGTERM on; new requests are refused.
        requests_in_flight: HTTP requests being handled.
        tracing: makes spans; None where that is off.
    """

    config: ServerConfig
    model: ServedModel
    catalogs: CatalogStore
    engine: EngineClient
    batcher: Batcher
    metrics: ServerMetrics
    window: Window
    access: Access
    tracing: Tracing | None = None
    draining: bool = False
    requests_in_flight: int = 0

    def require_ready(self) -> None:
        """Raises ProblemError (503) unless a new request would be taken."""
        self.require_not_draining()
        self.batcher.require_up()

    def require_not_draining(self) -> None:
        """Raises ProblemError (503) once the server is on its way out."""
        if self.draining:
            raise ProblemError(UNAVAILABLE, "the server is shutting down", retry_after=RETRY_SECONDS)


def with_tuned(config: ServerConfig, bundle: Bundle) -> ServerConfig:
    """The settings, where they leave it open with what `python -m loka_serve.tune` chose for the same engine.

    Raises:
        BundleError: the bundle's ``serving.json`` is not as expected.
    """
    tuned = read_serving(bundle.path)
    if tuned is None:
        return config
    engine = bundle.engine if config.engine == "auto" else config.engine
    if tuned.engine != engine:
        logger.warning(
            "the bundle was tuned for the %s engine: its settings are left aside for %s", tuned.engine, engine
        )
        return config
    return replace(
        config,
        max_batch=config.max_batch or tuned.max_batch,
        max_delay_ms=tuned.max_delay_ms if config.max_delay_ms is None else config.max_delay_ms,
        beam_width=config.beam_width or tuned.beam_width,
    )


def served_model(config: ServerConfig, bundle: Bundle) -> ServedModel:
    """The bundle's model under the limits of the settings; 0 and `auto` leave the bundle's own."""
    limits = bundle.limits
    return ServedModel(
        name=bundle.model_name if config.model_name == "auto" else config.model_name,
        config=bundle.config,
        max_batch=config.max_batch or limits.batch,
        max_beam_width=config.max_beam_width or max(limits.beam, config.beam_width, LEAST_BEAM_LIMIT),
        max_context=min(config.max_context or limits.context, bundle.config.max_context),
        beam_width=config.beam_width or bundle.config.beam_width,
    )


def engine_command(config: ServerConfig, bundle: Bundle, model: ServedModel) -> list[str]:
    """What starts the engine process of a bundle."""
    return [
        *(sys.executable, "-m", "loka_serve.server.engine_process"),
        *("--bundle", str(config.bundle.resolve())),
        *("--engine", bundle.engine if config.engine == "auto" else config.engine),
        *("--device", config.device),
        *("--cpu-threads", str(config.cpu_threads)),
        *("--max-batch", str(model.max_batch)),
        *("--max-beam-width", str(model.max_beam_width)),
        *("--max-context", str(model.max_context)),
        *("--hopper-options", config.hopper_options.to_json()),
        *("--drift-options", config.drift_options.to_json()),
    ]


def build_tracing(config: ServerConfig) -> Tracing | None:
    """What makes spans; None where tracing is off. Raises ConfigError without the packages for it."""
    if config.tracing == "off":
        return None
    try:
        from loka_serve.server.tracing import Tracing, otlp_provider

        return Tracing(otlp_provider())
    except ImportError as error:
        raise ConfigError(f"--tracing {config.tracing}: needs the extra otel: {error}") from None


def build_state(config: ServerConfig, model: ServedModel, catalog: Catalog, command: Sequence[str]) -> ServerState:
    """Put the parts together; nothing runs yet. `command` starts the engine process.

    Raises:
        ConfigError: the file of API keys is not as expected, or tracing lacks its packages.
    """
    metrics, window = ServerMetrics(), Window()
    engine = EngineClient(
        EngineSettings(
            command=command,
            log_level=config.log_level,
            log_format=config.log_format,
            start_timeout=config.engine_start_timeout_s,
            batch_timeout=config.engine_batch_timeout_s,
            restarts=config.engine_restarts,
        ),
        metrics,
    )
    delay_ms = DEFAULT_DELAY_MS if config.max_delay_ms is None else config.max_delay_ms
    settings = BatchSettings(
        model.max_batch, delay_ms / 1000, config.max_queue, config.max_batch_cost or math.inf, config.queue_share
    )
    batcher = Batcher(settings, engine.send_batch, metrics, window)
    engine.batcher = batcher
    metrics.queue_depth.set_function(lambda: batcher.queue_depth)
    metrics.batches_in_flight.set_function(lambda: batcher.batches_in_flight)
    catalogs = CatalogStore(catalog, model.config.codebook_sizes, engine, batcher, metrics)
    access = Access(ApiKeys(config.api_keys_file) if config.api_keys_file is not None else None, metrics)
    state = ServerState(config, model, catalogs, engine, batcher, metrics, window, access, build_tracing(config))
    metrics.requests_in_flight.set_function(lambda: state.requests_in_flight)
    return state
