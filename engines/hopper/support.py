"""What the hopper engine runs and what it refuses, decided before any weight is read. Imports no Triton."""

from __future__ import annotations

import torch

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import EngineLimits
from loka_serve.errors import EngineError
from loka_serve.models.config import OneRecV2Config
from loka_serve.quantization.plan import PrecisionPlan

CAPABILITY = (9, 0)
HEAD_DIMS = (16, 32, 64, 128)
RECIPES = ("bf16", "fp8_row", "fp8_block")
MAX_BEAM = 1024
MAX_EXPERTS = 256  # shared ones included


def check_device(device: torch.device) -> None:
    """Raises EngineError unless this is a Hopper GPU."""
    if device.type != "cuda":
        raise EngineError(f"device {device}: the hopper engine runs on a CUDA device of compute capability 9.0")
    found = torch.cuda.get_device_capability(device)
    if found != CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise EngineError(
            f"device {device} ({name}) has compute capability {found[0]}.{found[1]}: the hopper engine needs 9.0"
        )


def check_model(config: OneRecV2Config) -> None:
    """Raises EngineError for a shape that the kernels do not take; names the field."""
    if config.head_dim not in HEAD_DIMS:
        raise EngineError(f"config head_dim {config.head_dim}: the hopper engine runs {HEAD_DIMS}")
    for field in ("d_model", "expert_width", "d_ff"):
        if getattr(config, field) % 16:
            raise EngineError(f"config {field} {getattr(config, field)}: the hopper engine runs multiples of 16")
    if config.linear_bias:
        raise EngineError("config linear_bias true: the hopper engine runs linears without bias")
    if config.activation != "silu" and config.experts:
        raise EngineError(f"config activation {config.activation} with experts: the hopper engine runs silu there")
    experts = config.experts + config.shared_experts
    if config.experts and experts > MAX_EXPERTS:
        raise EngineError(f"config experts {config.experts} and shared: the hopper engine runs at most {MAX_EXPERTS}")


def check_limits(config: OneRecV2Config, limits: EngineLimits) -> None:
    """Raises EngineError for limits beyond the model or the kernels; names the limit."""
    if limits.levels != config.levels or limits.context > config.max_context:
        raise EngineError(
            f"limits {limits}: expected levels = {config.levels} and context at most {config.max_context}"
        )
    if limits.beam > MAX_BEAM:
        raise EngineError(f"limits.beam {limits.beam}: the hopper engine runs at most {MAX_BEAM}")
    if limits.beam * max(config.codebook_sizes) >= 1 << 31:
        raise EngineError(f"limits.beam {limits.beam} x codebook {max(config.codebook_sizes)}: expected below 2^31")


def check_plan(plan: PrecisionPlan) -> None:
    """Raises EngineError for a site whose recipe the kernels do not run; names it."""
    for site, recipe in plan.recipes.items():
        if recipe not in RECIPES:
            raise EngineError(f"site {site}: recipe {recipe}: the hopper engine runs {', '.join(RECIPES)}")
        if site.endswith(".moe.down"):
            check_expert_recipe(site, recipe)


def check_expert_recipe(down_site: str, recipe: str) -> None:
    """Raises EngineError for experts' second GEMM in fp8_row: only 1 x 128 codes leave the first one."""
    if recipe == "fp8_row":
        raise EngineError(f"site {down_site}: recipe fp8_row: the hopper engine runs it as bf16 or fp8_block")


def check_catalog(catalog: Catalog, config: OneRecV2Config) -> None:
    """Raises EngineError when the catalog's codebooks do not fit the model's."""
    sizes, expected = catalog.trie.codebook_sizes, config.codebook_sizes
    if len(sizes) != len(expected) or any(size > limit for size, limit in zip(sizes, expected, strict=True)):
        raise EngineError(f"catalog codebooks {sizes}: expected at most the model's {expected}")
