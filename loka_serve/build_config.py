"""Settings of the build; each field is a flag, an environment variable and a line of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from loka_serve.mods.names import EXPECTED, parse_mods
from loka_serve.settings import (
    Choice,
    Device,
    Directory,
    ExistingPath,
    Integer,
    Number,
    OutputPath,
    Switch,
    Text,
    read_settings,
    setting,
)


@dataclass(frozen=True)
class Mods:
    """A choice of mods, kept as it was written."""

    expected: ClassVar[str] = EXPECTED
    metavar: ClassVar[str] = "MODS"

    def parse(self, text: str) -> str:
        parse_mods(text)
        return text.strip().lower()


@dataclass(frozen=True)
class BuildConfig:
    """Settings of `python -m loka_serve.build`."""

    checkpoint: Path = setting(Directory(), "directory with config.json and model*.safetensors", "what to build")
    catalog: Path = setting(ExistingPath(), "items with their semantic IDs, in any known format", "what to build")
    calibration: Path = setting(ExistingPath(), "user histories to calibrate on", "what to build")
    out: Path = setting(OutputPath(), "the bundle to write; an older bundle there is replaced", "what to build")
    held_out: Path | None = setting(
        ExistingPath(), "user histories for the gate; without it, other rows of --calibration", "what to build", None
    )
    model_name: str = setting(
        Text("NAME"), "the model's name in answers; auto takes the checkpoint directory's", "what to build", "auto"
    )

    recipe: str = setting(
        Choice(("auto", "bf16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row")),
        "precision of attention, feed-forward and experts; auto lets the probe choose for every site",
        "precision",
        "auto",
    )
    mods: str = setting(
        Mods(),
        "rewrites before quantization: exact, none, all, or names with commas between; exact ones keep the function",
        "precision",
        "exact",
    )
    calibration_rows: int = setting(Integer(1, 1 << 20), "histories to calibrate on", "precision", 128)
    gate_rows: int = setting(Integer(1, 1 << 20), "histories to compare with BF16 on", "precision", 128)
    gate_top_k: int = setting(Integer(1, 1 << 16), "K of the gate's overlap; at most the beams", "precision", 50)
    min_top_k_overlap: float = setting(
        # Above what FP8 on load is reported to reach (0.70..0.76) and below what the near-uniform scores of random
        # weights give (about 0.85); a trained model should be held to 0.9 or more.
        Number(0, 1),
        "least top-K overlap with BF16; below it the exit code is 3 and the bundle is left at OUT.rejected",
        "precision",
        0.8,
    )
    compare: bool = setting(
        Switch(), "build every other recipe as well, for one table of quality, bytes and time", "precision", False
    )
    dispatch: Path | None = setting(
        ExistingPath(),
        "a table of python -m loka_serve.dispatch measure: auto keeps BF16 where a recipe is not 1.05x as fast",
        "precision",
        None,
    )
    probe_pairs: int = setting(
        Integer(0, 10_000),
        "synthetic pairs that give each site's errors with intervals; wide sites on a CPU take fewer, 0 none",
        "precision",
        100,
    )
    probe_cost_rows: int = setting(
        Integer(0, 1 << 16),
        "held-out histories on which each site alone is quantized, to see what it costs the model; 0 for none",
        "precision",
        16,
    )
    seed: int = setting(Integer(0, 1 << 31), "seed of the rows that are picked", "precision", 0)

    engine: str = setting(
        Text("NAME"),
        "the engine that the bundle is for; auto builds for all that run here and keeps the fastest that passes",
        "how",
        "reference",
    )
    trt_runtime: str = setting(
        Choice(("auto", "tensorrt", "tensorrt-rtx", "onnxruntime", "torch")),
        "what runs the tensorrt engine's segments; auto takes tensorrt on a GPU, onnxruntime on the CPU",
        "how",
        "auto",
    )
    device: str = setting(
        Device(), "where to calibrate: auto, cpu, cuda or cuda:N; auto takes a GPU if there is one", "how", "auto"
    )
    cpu_threads: int = setting(Integer(0, 1024), "threads on the CPU; 0 leaves one core free", "how", 0)
    batch: int = setting(Integer(1, 4096), "histories that run together while building", "how", 8)
    max_shard_bytes: int = setting(Integer(1 << 20, 1 << 45), "largest weight file", "how", 4 << 30)
    quiet: bool = setting(Switch(), "no progress bars", "how", False)

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Read the settings, as `ServerConfig.from_command_line` does."""
        return read_settings(
            cls,
            "python -m loka_serve.build",
            "Turn a checkpoint, a catalog and calibration histories into a bundle for python -m loka_serve.serve.",
            arguments,
            environment,
        )
