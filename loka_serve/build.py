"""`python -m loka_serve.build`: a checkpoint, a catalog and calibration histories become a bundle."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tqdm import tqdm

import loka_serve
from loka_serve.build_config import BuildConfig
from loka_serve.build_engines import build_fastest, format_engines
from loka_serve.build_probe import prefers_speed, probe_model
from loka_serve.build_segments import SegmentBuild
from loka_serve.build_summary import BuildOutcome, summarize
from loka_serve.bundle import (
    CATALOG_FILE,
    CONFIG_FILE,
    GATE_FILE,
    PLAN_FILE,
    PROBE_FILE,
    Bundle,
    add_files,
    check_replaceable,
    publish,
    staging_directory,
    write_json,
    write_manifest,
)
from loka_serve.bundle_weights import load_parameter, stored_dtype
from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.readers import read_catalog
from loka_serve.catalog.storage import is_compiled_catalog
from loka_serve.compare import compare_others, comparison, format_comparison, measure
from loka_serve.config import LEAST_BEAM_LIMIT, SERVED_BATCH
from loka_serve.cores import default_threads
from loka_serve.dispatch.table import keep_table, read_table
from loka_serve.engines import ENGINES, load_engine
from loka_serve.engines.base import Engine, EngineLimits, EngineRequest
from loka_serve.engines.hopper.support import check_limits, check_model, check_plan
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.errors import EngineError, LokaError
from loka_serve.gate import compare, recommend_items
from loka_serve.models.checkpoint import load_checkpoint, load_config
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.onerec_v2 import OneRecV2
from loka_serve.mods.names import parse_mods
from loka_serve.mods.report import ModReport
from loka_serve.mods.run import rewrite_model
from loka_serve.probe.collect import collect
from loka_serve.probe.histories import known_targets, sample_histories, to_request
from loka_serve.probe.report import SiteReport, format_table
from loka_serve.probe.run import AUTO, quantize
from loka_serve.quantization.methods import SiteMethod
from loka_serve.quantization.plan import PrecisionPlan
from loka_serve.quantization.recipes import RECIPES, State
from loka_serve.report.advice import advice
from loka_serve.report.files import COMPARISON_FILE, ENGINES_FILE, report_files
from loka_serve.tensor_files import TensorWriter

EXIT_ERROR, EXIT_GATE, EXIT_INTERRUPTED = 2, 3, 130


@dataclass(frozen=True)
class _Inputs:
    """Everything that a build reads but the weights."""

    model: OneRecV2Config
    catalog: Catalog
    calibration: list[EngineRequest]
    held_out: list[EngineRequest]
    targets: list[set[int]]


def build(config: BuildConfig) -> BuildOutcome:
    """Build a bundle: calibrate, choose, quantize, write, and compare with BF16.

    The checkpoint is in memory once; sites are quantized, written and freed one by one. Where the gate fails, nothing
    at `config.out` is touched and the bundle is left at the same path with ``.rejected`` appended.

    Raises:
        LokaError: names the file, flag, tensor or site at fault.
    """
    started = time.monotonic()
    rejected = config.out.with_name(config.out.name + ".rejected")
    check_replaceable(config.out)
    check_replaceable(rejected)
    if config.engine not in (*ENGINES, AUTO):
        raise EngineError(f"--engine {config.engine}: expected one of {', '.join((*ENGINES, AUTO))}")
    torch.set_num_threads(config.cpu_threads or default_threads())
    device = _device(config.device)
    if config.engine == AUTO:
        return _build_for_fastest_engine(config, device, rejected)
    segments = SegmentBuild.of(config, device) if config.engine == "tensorrt" else None
    speeds = None if config.dispatch is None else read_table(config.dispatch)
    inputs = _read_inputs(config)
    limits = EngineLimits(config.batch, inputs.model.beam_width, inputs.model.max_context, inputs.model.levels)
    if config.engine == "hopper":
        biases = inputs.model.linear_bias and "fold_biases" not in parse_mods(config.mods)
        check_hopper(replace(inputs.model, linear_bias=biases), limits, config.recipe)
    top_k = min(config.gate_top_k, inputs.model.beam_width)
    bar = _Bars(config.quiet)
    rows = compare_others(config, limits, inputs.held_out, build, device) if config.compare else []

    model = load_checkpoint(config.checkpoint, device)
    cache_weight = prefers_speed(model)
    run_as_bf16(model, cache_weight)
    engine = ReferenceEngine(model, inputs.catalog, limits, device)
    # Mods change what sites see, as a rule: covariances are gathered when they are done.
    has_mods, covariance = bool(parse_mods(config.mods)), config.probe_pairs > 0
    with bar("calibrate", len(inputs.calibration)) as progress:
        observed = collect(engine, model, inputs.calibration, progress, covariance and not has_mods)
    with bar("rank in BF16", len(inputs.held_out)) as progress:
        bf16 = recommend_items(engine, inputs.catalog, inputs.held_out, top_k, progress)
    mods, changes_inputs = rewrite_model(model, observed, config.mods, config.recipe, config.checkpoint)
    inputs = replace(inputs, model=model.config)
    if config.engine == "hopper":
        check_model(model.config)
    run_as_bf16(model, cache_weight)
    if changes_inputs or (covariance and has_mods):
        observed.clear()
        with bar("calibrate again", len(inputs.calibration)) as progress:
            observed = collect(engine, model, inputs.calibration, progress, covariance)
    del engine
    sites = probe_model(config, model, observed, inputs.held_out, bf16, inputs.catalog, bar, speeds)

    with staging_directory(config.out) as stage:
        with bar("quantize", len(model.sites())) as progress, TensorWriter(stage, config.max_shard_bytes) as writer:

            def store(site: str, state: State) -> None:
                for key, tensor in state.items():
                    writer.write(f"{site}.{key}", tensor)

            _write_parameters(model, writer)
            quantize(model, sites, store, progress)
        if config.engine == "hopper":
            check_plan(PrecisionPlan({site.name: site.choice.recipe for site in sites}))
        del model
        gc.collect()
        _write_descriptions(stage, inputs, sites, mods)
        keep_table(stage, speeds)
        if segments is not None:
            segments.write(stage, inputs.model, PrecisionPlan({site.name: site.choice.recipe for site in sites}), bar)
        _complete(stage, config, inputs, mods, gate={"passed": None})
        bundle = Bundle.load(stage, verify=False)
        quantized_engine: Engine
        if segments is not None and segments.runs_here:
            quantized_engine = load_engine(bundle, config.engine, str(device), limits)
        else:
            model = bundle.load_model(device, cache_weight=cache_weight)
            quantized_engine = ReferenceEngine(model, inputs.catalog, limits, device)
        with bar("rank quantized", len(inputs.held_out)) as progress:
            quantized = recommend_items(quantized_engine, inputs.catalog, inputs.held_out, top_k, progress)
        gate = compare(quantized, bf16, inputs.targets, inputs.catalog, top_k, config.min_top_k_overlap)
        compared = None
        if config.compare:
            rows.append(measure(config.recipe, stage, sites, gate, config.engine, limits, inputs.held_out, device))
            compared = comparison(rows, config.recipe, config.engine, device, config.batch)
            write_json(stage / COMPARISON_FILE, compared)
        _complete(stage, config, inputs, mods, gate.to_dict())
        destination = config.out if gate.passed else rejected
        publish(stage, destination)
    return BuildOutcome(destination, sites, mods, gate, compared, time.monotonic() - started)


def _build_for_fastest_engine(config: BuildConfig, device: torch.device, rejected: Path) -> BuildOutcome:
    inputs = _read_inputs(config)
    limits = EngineLimits(config.batch, inputs.model.beam_width, inputs.model.max_context, inputs.model.levels)

    def keep(outcome: BuildOutcome, engines: dict[str, Any]) -> BuildOutcome:
        bundle = Bundle.load(outcome.path, verify=False)
        write_json(outcome.path / ENGINES_FILE, engines)
        record = (outcome.path / ENGINES_FILE).read_bytes()
        add_files(
            outcome.path,
            {ENGINES_FILE: record, **report_files(outcome.path, bundle.model_name, bundle.engine)},
        )
        destination = config.out if outcome.gate.passed else rejected
        publish(outcome.path, destination)
        return replace(outcome, path=destination, engines=engines)

    return build_fastest(config, limits, inputs.held_out, device, build, keep)


def check_hopper(model: OneRecV2Config, limits: EngineLimits, recipe: str) -> None:
    """Raises EngineError, before any weight is read, where the hopper engine would refuse the bundle."""
    check_model(model)
    check_limits(model, replace(limits, beam=max(limits.beam, LEAST_BEAM_LIMIT)))  # as it is served
    if recipe != AUTO:
        with torch.device("meta"):
            check_plan(PrecisionPlan.uniform(OneRecV2(model).sites(), recipe))


def run_as_bf16(model: OneRecV2, cache_weight: bool) -> None:
    """Let a loaded model compute as a bf16 bundle of it would, while its sites keep their weights."""
    sites = model.sites()
    for name, parameter in list(model.named_parameters()):
        if name.removesuffix(".weight") not in sites:
            rounded = parameter.data.to(stored_dtype(parameter))
            load_parameter(model, name, rounded, parameter.device, torch.float32)
    for site in sites.values():
        assert site.weight is not None
        site.method = SiteMethod(RECIPES["bf16"], {"weight": site.weight.data}, cache_weight)


def _read_inputs(config: BuildConfig) -> _Inputs:
    model = load_config(config.checkpoint)
    compiled = config.catalog.suffix == ".safetensors" and is_compiled_catalog(config.catalog)
    # A compiled catalog has codebook sizes of its own; the engine checks that they fit.
    catalog = read_catalog(config.catalog, None if compiled else model.codebook_sizes)
    calibration, held_out = sample_histories(
        config.calibration, config.held_out, catalog, config.calibration_rows, config.gate_rows, config.seed
    )
    return _Inputs(
        model=model,
        catalog=catalog,
        calibration=[to_request(history, catalog, model, model.beam_width) for history in calibration],
        held_out=[to_request(history, catalog, model, model.beam_width) for history in held_out],
        targets=known_targets(held_out, catalog),
    )


def _write_parameters(model: OneRecV2, writer: TensorWriter) -> None:
    """Everything that is no site's weight: embeddings, norm gains, biases."""
    sites = model.sites()
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in sites:
            writer.write(name, parameter.data.to(stored_dtype(parameter)))


def _write_descriptions(stage: Path, inputs: _Inputs, sites: list[SiteReport], mods: ModReport) -> None:
    plan = PrecisionPlan({site.name: site.choice.recipe for site in sites})
    write_json(stage / CONFIG_FILE, inputs.model.to_dict())
    write_json(stage / PLAN_FILE, plan.to_dict())
    write_json(
        stage / PROBE_FILE,
        {
            "calibration_rows": len(inputs.calibration),
            "sites": [site.to_dict() for site in sites],
            "mods": mods.to_dict(),
        },
    )
    inputs.catalog.save(stage / CATALOG_FILE)


def _complete(stage: Path, config: BuildConfig, inputs: _Inputs, mods: ModReport, gate: Mapping[str, Any]) -> None:
    """Write what is known of the gate, and the manifest over all files; the bundle can be loaded from then on."""
    write_json(stage / GATE_FILE, gate)
    model_name = config.checkpoint.resolve().name if config.model_name == "auto" else config.model_name
    if gate["passed"] is not None:
        for name, content in report_files(stage, model_name, config.engine).items():
            (stage / name).write_bytes(content)
    write_manifest(
        stage,
        model_name=model_name,
        engine=config.engine,
        limits=EngineLimits(SERVED_BATCH, inputs.model.beam_width, inputs.model.max_context, inputs.model.levels),
        details={
            "recipe": config.recipe,
            "mods": mods.record(),
            "seed": config.seed,
            "catalog_version": inputs.catalog.version,
            "loka_serve": loka_serve.__version__,
            "torch": torch.__version__,
        },
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:  # a number that is none of a device
        raise EngineError(f"--device {name} is not usable here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


class _Bars:
    """Progress bars on a terminal's standard error; nothing elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self._off = quiet or not sys.stderr.isatty()

    @contextmanager
    def __call__(self, title: str, total: int) -> Iterator[Callable[[int], object]]:
        with tqdm(total=total, desc=title.ljust(14), disable=self._off, file=sys.stderr, leave=True) as bar:
            yield bar.update


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 built, 2 bad input, 3 the gate failed, 130 interrupted."""
    previous = signal.signal(signal.SIGTERM, _interrupt)  # as Ctrl-C: the half-written bundle is removed
    try:
        config = BuildConfig.from_command_line(sys.argv[1:] if arguments is None else arguments, os.environ)
        outcome = build(config)
    except (LokaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(format_table(outcome.sites))
    for line in outcome.mods.lines():
        print(line)
    if outcome.comparison is not None:
        print(format_comparison(outcome.comparison))
    for line in [] if outcome.engines is None else format_engines(outcome.engines):
        print(line)
    print(summarize(outcome))
    for warning in outcome.gate.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if outcome.gate.passed:
        return 0
    for line in advice(outcome.sites, outcome.gate, config.recipe):
        print(line, file=sys.stderr)
    return EXIT_GATE


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
