"""What a result must say about where it comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "triton", "flashinfer-python", "sgl-deep-gemm", "numpy")


def describe_environment(commit: str | None = None) -> dict[str, Any]:
    """GPU, driver, versions, commit and command line; pass the commit, or set LOKA_COMMIT, where git is not at hand."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "commit": commit or os.environ.get("LOKA_COMMIT") or _commit(),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
    }


def _commit() -> str | None:
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None
