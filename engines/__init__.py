"""Engines that run a bundle: `reference` everywhere, `hopper` on one Hopper GPU, `tensorrt` where its plans run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loka_serve.errors import EngineError

if TYPE_CHECKING:
    from loka_serve.bundle import Bundle
    from loka_serve.engines.base import Engine, EngineLimits
    from loka_serve.engines.hopper.options import HopperOptions

ENGINES = ("reference", "hopper", "tensorrt")


def load_engine(
    bundle: Bundle, engine: str, device: str, limits: EngineLimits, hopper: HopperOptions | None = None
) -> Engine:
    """Build the engine named `engine` from a bundle on `device` (`cpu`, `cuda`, `cuda:1`).

    `hopper` is for the engines that run its kernels, `hopper` and `tensorrt`; None takes the defaults.

    Raises:
        EngineError: unknown engine or device, or limits that the model cannot reach.
    """
    if engine not in ENGINES:
        raise EngineError(f"engine {engine!r}: expected one of {', '.join(ENGINES)}")
    # Imported late: the API process reads ENGINES and never loads torch.
    import torch

    from loka_serve.engines.reference import ReferenceEngine

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"device {device!r} is not usable here: {str(error).splitlines()[0]}") from error
    if engine == "hopper":
        from loka_serve.engines.hopper.engine import DEFAULT_OPTIONS, HopperEngine

        return HopperEngine(bundle, limits, device, hopper or DEFAULT_OPTIONS)
    if engine == "tensorrt":
        from loka_serve.engines.hopper.options import HopperOptions as Options
        from loka_serve.engines.tensorrt.engine import load_tensorrt_engine

        return load_tensorrt_engine(bundle, limits, device, hopper or Options())
    return ReferenceEngine(bundle.load_model(device), bundle.catalog, limits, device)


def default_device(bundle: Bundle, engine: str) -> str:
    """`cuda` where there is a GPU, unless the bundle's segments were built for the CPU.

    Raises:
        BundleError: the engine is `tensorrt`, and the bundle was not built for it.
    """
    import torch

    if engine == "tensorrt":
        from loka_serve.engines.tensorrt.artifacts import Artifacts

        if Artifacts.load(bundle.path).dtype == "float32":
            return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"
