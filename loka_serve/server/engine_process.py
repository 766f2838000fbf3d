"""The engine process: `python -m loka_serve.server.engine_process`, started by the API process. It owns the device."""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable

import zmq

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import DispatchedEngine, DriftWatchingEngine, Engine
from loka_serve.errors import LokaError
from loka_serve.server import messages
from loka_serve.server.device_memory import MemoryWatch, read_device_memory
from loka_serve.server.engine_worker import EngineWorker
from loka_serve.server.log import configure_logging

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load the bundle that the arguments name and serve it until the API process says stop or ends."""
    parser = argparse.ArgumentParser(description="Started by loka_serve.serve; not meant to be called by hand.")
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--device", required=True)
    for limit in ("--cpu-threads", "--max-batch", "--max-beam-width", "--max-context"):
        parser.add_argument(limit, type=int, required=True)
    parser.add_argument("--hopper-options", required=True)
    parser.add_argument("--drift-options", required=True)
    add_connection_arguments(parser)
    arguments = parser.parse_args()

    def load() -> tuple[Engine, Catalog, str]:
        # Imported late: loading torch takes seconds in which the parent may already be gone.
        import torch

        from loka_serve.bundle import Bundle
        from loka_serve.cores import default_threads
        from loka_serve.drift.engine import guarded
        from loka_serve.drift.options import DriftOptions
        from loka_serve.engines import default_device, load_engine
        from loka_serve.engines.base import EngineLimits
        from loka_serve.engines.hopper.options import HopperOptions

        bundle = Bundle.load(arguments.bundle)
        device = arguments.device
        if device == "auto":
            device = default_device(bundle, arguments.engine)
        torch.set_num_threads(arguments.cpu_threads or default_threads())
        limits = EngineLimits(
            arguments.max_batch, arguments.max_beam_width, arguments.max_context, bundle.config.levels
        )
        options = HopperOptions.from_json(arguments.hopper_options)
        engine = load_engine(bundle, arguments.engine, device, limits, options)
        return guarded(engine, bundle.probe, DriftOptions.from_json(arguments.drift_options)), bundle.catalog, device

    serve(arguments, load)


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that the API process adds to whatever command starts its engine."""
    parser.add_argument("--endpoint", required=True, help="ZeroMQ address without its .work or .results")
    parser.add_argument("--parent", type=int, required=True, help="process id of the API process")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")


def serve(arguments: argparse.Namespace, load: Callable[[], tuple[Engine, Catalog, str]]) -> None:
    """Load, warm up, say so, and work until told to stop. `load` gives the engine, its catalog and its device."""
    configure_logging(arguments.log_level, "engine", arguments.log_format)
    ignore_terminal_signals()
    die_with_parent(arguments.parent)
    context = zmq.Context()
    work, results = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    work.connect(f"{arguments.endpoint}.work")
    results.connect(f"{arguments.endpoint}.results")
    try:
        status = _serve(arguments.parent, load, work, results)
    except Exception:
        logger.exception("the engine process ends")
        status = 1
    context.destroy(linger=1000)
    logging.shutdown()
    os._exit(status)  # not through the interpreter's end: a broken device context may hang there


def _serve(
    parent: int, load: Callable[[], tuple[Engine, Catalog, str]], work: zmq.Socket[bytes], results: zmq.Socket[bytes]
) -> int:
    started = time.perf_counter()
    try:
        engine, catalog, device = load()
        loaded = time.perf_counter()
        engine.warmup()
    except LokaError as error:
        results.send(messages.encode(messages.StartFailed(str(error))))
        return messages.START_FAILED_STATUS
    warm = time.perf_counter()
    limits = engine.limits
    dispatch = engine.dispatch_info if isinstance(engine, DispatchedEngine) else None
    ready = messages.Ready(
        engine=engine.name,
        device=device,
        max_batch=limits.batch,
        max_beam_width=limits.beam,
        max_context=limits.context,
        load_seconds=loaded - started,
        warmup_seconds=warm - loaded,
        dispatch_source=dispatch.source if dispatch else None,
        dispatch_reason=dispatch.reason if dispatch else None,
        drift_sites=engine.drift_sites if isinstance(engine, DriftWatchingEngine) else (),
    )
    memory = MemoryWatch(lambda: read_device_memory(device))
    worker = EngineWorker(engine, catalog, work, results, parent, memory)
    results.send(messages.encode(ready))
    worker.run()
    return 0


def ignore_terminal_signals() -> None:
    """Ctrl-C and a service manager's SIGTERM reach the whole group; the API process decides when the engine ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends; elsewhere the worker notices by looking."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(0)


if __name__ == "__main__":
    main()
