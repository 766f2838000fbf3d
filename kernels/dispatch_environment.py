"""What a measurement of kernels holds for: GPU, driver, and versions of every library that was tried."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from .linear.adapters import presences


@dataclass(frozen=True)
class Environment:
    """Another GPU, driver or version of a library may choose otherwise; None is what is not here."""

    gpu: str | None
    driver: str | None
    cuda: str | None
    pytorch: str
    triton: str | None
    deep_gemm: str | None
    fbgemm: str | None = None
    torchao: str | None = None
    flashinfer: str | None = None

    @classmethod
    def current(cls, device: torch.device | str) -> Environment:
        """Of this process and device."""
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        versions = {presence.library: presence.version for presence in presences()} if on_gpu else {}
        return cls(
            gpu=torch.cuda.get_device_name(device) if on_gpu else None,
            driver=_driver() if on_gpu else None,
            cuda=torch.version.cuda,
            pytorch=torch.__version__,
            triton=versions.get("triton"),
            deep_gemm=versions.get("deep_gemm"),
            fbgemm=versions.get("fbgemm"),
            torchao=versions.get("torchao"),
            flashinfer=versions.get("flashinfer"),
        )

    def differences(self, other: Environment) -> str:
        """What differs, as text for a log; empty if nothing does."""
        mine, its = asdict(self), asdict(other)
        return ", ".join(f"{name} {mine[name]} here but {its[name]} there" for name in mine if mine[name] != its[name])


def libraries_here() -> Mapping[str, str]:
    """Every library that has an adapter: its version, or the reason for its absence."""
    return {presence.library: str(presence) for presence in presences()}


@functools.cache
def _driver() -> str | None:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return output.splitlines()[0].strip() if output.strip() else None
