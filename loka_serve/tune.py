"""`python -m loka_serve.tune --bundle DIR --p99-ms 70`: find the setting that serves best, and keep it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from loka_serve.bundle import Bundle, add_files
from loka_serve.catalog.histories import read_histories
from loka_serve.config import ServerConfig
from loka_serve.errors import CatalogError, ConfigError, LokaError, TuningError
from loka_serve.probe.histories import to_request
from loka_serve.server.log import configure_logging
from loka_serve.server.messages import WireRequest, pack_integers
from loka_serve.server.state import engine_command, served_model
from loka_serve.serving import SERVING_FILE, ServingDefaults
from loka_serve.tuning.config import TuneConfig
from loka_serve.tuning.drawing import describe, draw
from loka_serve.tuning.load import Point, running_load
from loka_serve.tuning.sweep import Bounds, Grid, Tuning, tune

EXIT_ERROR, EXIT_BOUND, EXIT_INTERRUPTED = 2, 3, 130
DRAWING_FILE = "tuning.svg"
DELAYS_MS = (0.0, 2.0, 5.0)
ITEMS = 20
MOST_HISTORIES = 1024


def grid_of(config: TuneConfig, bundle: Bundle) -> Grid:
    """What the settings ask to sweep; where they leave it open, around the bundle's own limits."""
    largest = bundle.limits.batch
    batches = config.batches or tuple(sorted({*(1 << power for power in range(largest.bit_length())), largest}))
    beam = bundle.config.beam_width
    beams = config.beams or tuple({beam: None, max(1, beam // 2): None, max(1, beam // 4): None})
    return Grid(
        tuple(sorted(batches)), tuple(sorted(config.delays_ms or DELAYS_MS)), tuple(sorted(beams, reverse=True))
    )


def requests_of(config: TuneConfig, bundle: Bundle) -> list[WireRequest]:
    """What is asked for: the histories of a file, or random ones as long as the model's context.

    Raises:
        CatalogError: names the file that cannot be read or holds no history.
    """
    catalog, model = bundle.catalog, bundle.config
    if config.histories is None:
        generator = np.random.default_rng(config.seed)
        picked = generator.integers(0, catalog.item_count, (64, bundle.limits.context))
        return [
            WireRequest(pack_integers(catalog.semantic_ids(items)), [0] * len(model.features), 1, ITEMS)
            for items in picked
        ]
    found = []
    for history in read_histories(config.histories, catalog):
        request = to_request(history, catalog, model, 1)
        codes = request.history[-bundle.limits.context :]
        found.append(WireRequest(pack_integers(codes), request.features.tolist(), 1, ITEMS))
        if len(found) == MOST_HISTORIES:
            break
    if not found:
        raise CatalogError(f"{config.histories}: no histories: expected at least one")
    return found


async def measure(config: TuneConfig, bundle: Bundle, grid: Grid, engine: str) -> Tuning:
    """Start the bundle's engine at the grid's largest batch and beam, and sweep.

    Raises:
        LokaError: the engine does not start or fails, or no setting meets the bounds.
    """
    server = ServerConfig(
        bundle=config.bundle,
        engine=engine,
        device=config.device,
        cpu_threads=config.cpu_threads,
        max_batch=grid.batches[-1],
        max_beam_width=grid.beams[0],
    )
    command = engine_command(server, bundle, served_model(server, bundle))

    def show(point: Point) -> None:
        print(describe(point), file=sys.stderr)

    requests = requests_of(config, bundle)
    print(f"starting the {engine} engine; then at most {grid.settings} settings", file=sys.stderr)
    async with running_load(
        command, config.engine_start_timeout_s, bundle.catalog.version, requests, config.seed
    ) as load:
        return await tune(load, grid, bounds_of(config), config.seconds, show)


def bounds_of(config: TuneConfig) -> Bounds:
    """What a setting must reach."""
    return Bounds(config.p99_ms, config.min_requests_per_second)


def files_of(tuning: Tuning, config: TuneConfig, engine: str) -> dict[str, bytes]:
    """The bundle's ``serving.json`` and ``tuning.svg``."""
    setting = tuning.chosen.setting
    defaults = ServingDefaults(engine, setting.max_batch, setting.max_delay_ms, setting.beam_width)
    histories = "random, of the longest context" if config.histories is None else config.histories.name
    values: dict[str, Any] = {
        "chosen": defaults.to_dict(),
        "measured": dataclasses.asdict(tuning.chosen),
        "bounds": dataclasses.asdict(bounds_of(config)),
        "histories": histories,
        "device": config.device,
        "points": [dataclasses.asdict(point) for point in (*tuning.points, *tuning.confirmations)],
    }
    drawing = draw(tuning, bounds_of(config), f"{engine} engine: throughput within a latency")
    return {SERVING_FILE: (json.dumps(values, indent=1) + "\n").encode(), DRAWING_FILE: drawing.encode()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 tuned; 2 bad input, 3 no setting meets the bounds, 130 interrupted: the bundle is as before."""
    try:
        config = TuneConfig.from_command_line(sys.argv[1:] if arguments is None else arguments, os.environ)
        configure_logging("warning", "tune")
        bundle = Bundle.load(config.bundle)
        engine = bundle.engine if config.engine == "auto" else config.engine
        grid = grid_of(config, bundle)
        if config.beams and grid.beams[0] > bundle.catalog.item_count:
            raise ConfigError(
                f"--beams {grid.beams[0]}: expected at most the catalog's {bundle.catalog.item_count} items"
            )
        tuning = asyncio.run(measure(config, bundle, grid, engine))
        add_files(config.bundle, files_of(tuning, config, engine))
    except TuningError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BOUND
    except (LokaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted: the bundle is as it was", file=sys.stderr)
        return EXIT_INTERRUPTED
    setting = tuning.chosen.setting
    print(
        f"{config.bundle}: --max-batch {setting.max_batch} --max-delay-ms {setting.max_delay_ms:g} --beam-width "
        f"{setting.beam_width}: {describe(tuning.chosen)}; written to {SERVING_FILE}, which serve takes as its defaults"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
