"""Settings of the server; each field is a flag, an environment variable and a line of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from loka_serve.drift.options import DriftOptions
from loka_serve.engines import ENGINES
from loka_serve.engines.hopper.options import CONTEXT_PRECISIONS, HopperOptions
from loka_serve.settings import (
    Choice,
    Device,
    Directory,
    ExistingPath,
    Integer,
    Number,
    OutputPath,
    Sizes,
    Switch,
    Text,
    read_settings,
    setting,
)

DEFAULT_DELAY_MS = 2.0
"""How long a request waits for company where neither a setting nor `python -m loka_serve.tune` says."""
LEAST_BEAM_LIMIT = 128
"""What a server takes at least unless told: a model with few beams by default still answers for many items."""
SERVED_BATCH = 32
"""Requests of a batch that a server takes unless its settings say otherwise."""
HOPPER = "the hopper engine, and tensorrt on a GPU (others ignore these)"
SECURITY = "security"
DRIFT = "the drift guard (with the reference engine only, for now; others ignore these)"


@dataclass(frozen=True)
class ServerConfig:
    """Settings of `python -m loka_serve.serve`."""

    bundle: Path = setting(Directory(), "the bundle that python -m loka_serve.build wrote", "what to serve")
    engine: str = setting(
        Choice(("auto", *ENGINES)), "what runs the bundle; auto takes the one it was built for", "what to serve", "auto"
    )
    device: str = setting(
        Device(), "auto, cpu, cuda or cuda:N; auto takes a GPU if there is one", "what to serve", "auto"
    )
    cpu_threads: int = setting(
        Integer(0, 1024), "threads of an engine on the CPU; 0 leaves one core to the API", "what to serve", 0
    )
    model_name: str = setting(
        Text("NAME"), "the model's name in answers; auto takes the bundle's", "what to serve", "auto"
    )
    max_beam_width: int = setting(
        Integer(0, 65536), "widest beam of a request; 0 takes the bundle's, but at least 128", "what to serve", 0
    )
    max_context: int = setting(
        Integer(0, 1 << 20), "longest history that is used (the newest items); 0 takes the bundle's", "what to serve", 0
    )

    host: str = setting(Text("ADDRESS"), "address to listen on", "listening", "127.0.0.1")
    port: int = setting(Integer(0, 65535), "port to listen on; 0 takes a free one", "listening", 8000)

    max_batch: int = setting(
        Integer(0, 4096),
        "most requests that are computed together; 0 takes what python -m loka_serve.tune chose, or the bundle's limit",
        "batching",
        0,
    )
    max_delay_ms: float | None = setting(
        Number(0, 10_000),
        "longest time that a request waits for others to share its batch (default: what tune chose, or 2)",
        "batching",
        None,
    )
    beam_width: int = setting(
        Integer(0, 65536),
        "beams of a request that names none; 0 takes what tune chose, or the model's",
        "batching",
        0,
    )

    hopper_context_precision: str = setting(
        Choice(CONTEXT_PRECISIONS),
        "in which attention reads the context's keys and values",
        HOPPER,
        HopperOptions.context_precision,
    )
    hopper_batches: tuple[int, ...] = setting(
        Sizes(),
        "batch sizes to capture beside --max-batch; auto takes 2, 3, 4, 6, 8, 12, ...",
        HOPPER,
        HopperOptions.batches,
    )
    hopper_beams: tuple[int, ...] = setting(
        Sizes(),
        "beam widths to capture beside --max-beam-width; auto doubles up to it from 128",
        HOPPER,
        HopperOptions.beams,
    )
    hopper_contexts: tuple[int, ...] = setting(
        Sizes(),
        "history lengths to capture beside --max-context; auto quadruples up to it from 512",
        HOPPER,
        HopperOptions.contexts,
    )
    hopper_memory_share: float = setting(
        Number(0.01, 1),
        "part of the GPU's memory that weights and workspaces may fill",
        HOPPER,
        HopperOptions.memory_share,
    )
    hopper_catalog_headroom: float = setting(
        Number(1, 1000),
        "room for larger catalogs, as a multiple of the first one",
        HOPPER,
        HopperOptions.catalog_headroom,
    )
    hopper_tune: bool = setting(
        Switch(),
        "measure which library runs each GEMM fastest, unless that is on file; off takes defaults",
        HOPPER,
        HopperOptions.tune,
    )
    hopper_batch_invariant: bool = setting(
        Switch(),
        "give a request the same bits alone, in any batch and in any order; slower",
        HOPPER,
        HopperOptions.batch_invariant,
    )
    frozen_dispatch: bool = setting(
        Switch(),
        "refuse to start, rather than measure, where no dispatch table of this GPU, driver and versions is there",
        HOPPER,
        HopperOptions.frozen_dispatch,
    )

    max_queue: int = setting(
        Integer(1, 1 << 20), "most requests that wait; beyond that the answer is 429", "limits", 1024
    )
    max_batch_cost: int = setting(
        Integer(0, 1 << 40),
        "most requests x widest beam x longest history of a batch, which a single request may exceed; 0 for no bound",
        "batching",
        0,
    )
    tenant_header: str = setting(
        Text(),
        "name of a request header that tells tenants apart: they share the engine fairly (default: none)",
        "batching",
        "",
    )
    queue_share: float = setting(
        Number(0.001, 1), "part of the queue that one tenant, or bulk requests together, may hold", "batching", 0.5
    )
    max_connections: int = setting(
        Integer(1, 1 << 20), "most open connections; beyond that new ones are closed at once", "limits", 8192
    )
    max_body_bytes: int = setting(
        Integer(1, 1 << 30), "largest request body; beyond that the answer is 413", "limits", 4 << 20
    )
    max_batch_requests: int = setting(
        Integer(1, 1 << 16), "most requests in one POST /v1/recommend/batch", "limits", 256
    )
    default_timeout_ms: float = setting(
        Number(1, 3_600_000), "deadline of a request that names none; beyond that the answer is 504", "limits", 5_000.0
    )
    body_timeout_s: float = setting(Number(0.1, 3_600), "longest time for a request body to arrive", "limits", 10.0)

    api_keys_file: Path | None = setting(
        ExistingPath(),
        "a file of lines NAME SCOPE KEY, scope recommend or admin; read again when it changes (default: no keys)",
        SECURITY,
        None,
    )
    allow_debug: bool = setting(
        Switch(),
        "open GET /v1/debug/batches where there are no API keys; with keys it needs an admin's",
        SECURITY,
        False,
    )

    allow_catalog_updates: bool = setting(
        Switch(),
        "open PUT /v1/catalog and POST /v1/catalog/rollback to keys of scope admin, or to all if there are no keys",
        "catalog",
        False,
    )
    watch_catalog: Path | None = setting(
        OutputPath(),
        "a JSONL or Parquet file that goes live whenever it is replaced; it need not be there yet (default: none)",
        "catalog",
        None,
    )
    max_catalog_bytes: int = setting(Integer(1, 1 << 40), "largest body of PUT /v1/catalog", "catalog", 2 << 30)

    drift_sample_every: int = setting(
        Integer(0, 1 << 20),
        "compare every site's inputs with calibration's in one batch of so many; 0 for no guard",
        DRIFT,
        DriftOptions.sample_every,
    )
    drift_window: int = setting(
        Integer(1, 1 << 20), "sampled requests that a site is judged by, the latest ones", DRIFT, DriftOptions.window
    )
    drift_psi_limit: float = setting(
        Number(0.001, 1000),
        "population stability index beyond which a site computes in BF16, until it is within half of it",
        DRIFT,
        DriftOptions.psi_limit,
    )
    drift_amax_ratio: float = setting(
        Number(1.001, 1_000_000),
        "largest input over calibration's, beyond which a site computes in BF16",
        DRIFT,
        DriftOptions.amax_ratio,
    )

    engine_start_timeout_s: float = setting(
        Number(1, 86_400),
        "longest time for the engine to load and warm up, and for a swap to another catalog",
        "faults",
        900.0,
    )
    engine_batch_timeout_s: float = setting(
        Number(0.1, 86_400),
        "longest time for one batch; beyond that the engine is killed and restarted",
        "faults",
        60.0,
    )
    engine_restarts: int = setting(
        Integer(0, 1000), "failed restarts of the engine in a row before the server gives up and exits", "faults", 8
    )
    drain_timeout_s: float = setting(
        Number(0, 3_600), "after SIGTERM: longest time to answer the requests in flight", "faults", 8.0
    )

    log_level: str = setting(
        Choice(("debug", "info", "warning", "error")), "least level that is logged", "logging and tracing", "info"
    )
    log_format: str = setting(
        Choice(("text", "json")), "lines for people, or one JSON object a line", "logging and tracing", "text"
    )
    tracing: str = setting(
        Choice(("off", "otlp")),
        "spans of each request to an OpenTelemetry collector; OTEL_EXPORTER_OTLP_ENDPOINT and the like say how",
        "logging and tracing",
        "off",
    )
    summary_interval_s: float = setting(
        Number(0, 86_400), "seconds between the log's one-line summaries; 0 for none", "logging and tracing", 10.0
    )

    @property
    def hopper_options(self) -> HopperOptions:
        """What the hopper engine is to be started with."""
        return HopperOptions(
            context_precision=self.hopper_context_precision,
            batches=self.hopper_batches,
            beams=self.hopper_beams,
            contexts=self.hopper_contexts,
            memory_share=self.hopper_memory_share,
            catalog_headroom=self.hopper_catalog_headroom,
            tune=self.hopper_tune,
            frozen_dispatch=self.frozen_dispatch,
            batch_invariant=self.hopper_batch_invariant,
        )

    @property
    def drift_options(self) -> DriftOptions:
        """What the drift guard is to be started with."""
        return DriftOptions(self.drift_sample_every, self.drift_window, self.drift_psi_limit, self.drift_amax_ratio)

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Read the settings; a flag wins over its environment variable.

        Raises:
            ConfigError: a value that is not as expected, an unknown flag, a required setting that is missing.
        """
        return read_settings(
            cls,
            "python -m loka_serve.serve",
            "Serve a bundle over HTTP: POST /v1/recommend answers a history with items. Docs at /docs.",
            arguments,
            environment,
        )
