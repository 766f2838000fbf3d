"""The least time that a batch could take on a GPU: its arithmetic and its traffic over what the GPU was measured to do.

A request is context processing and then one decode step a level. Every class of operations below takes

    max(FLOPs / measured GEMM rate of its precision, bytes / measured copy bandwidth)

and the floor is the sum over all classes, since each needs what the one before it made. Within a class arithmetic and
traffic overlap perfectly, nothing is launched, waited for or done twice, and operations that are only fast code around
these (norms, softmax, quantization, sorting, selection) take no time at all. With M rows in a step (the batch at the
first level, batch x beams after it), T = 1 + context, and s bytes a number in the recipe:

    context      gather of the embeddings; [batch T, d] x [d, d_context]; keys and values written
    linears      q, o, qkv, o of each layer, dense SwiGLU layers, router: 2 M in out FLOPs;
                 the weight, M in s and 2 M out bytes
    experts      M (k + shared) rows through three matrices; the weights of the experts that M tokens are expected to
                 touch, E (1 - (1 - k / E)^M) of E, and their inputs, hidden rows and outputs
    attention    4 M T heads head_dim FLOPs a layer; its keys and values (once where keys serve as values), M queries
                 and results
    beams        self-attention over at most L positions of a beam: 4 M positions heads head_dim; the distinct keys and
                 values of a request, M queries and results
    head         M x d x V; no logits are counted, since what selects could take them where they are made

The first step has few rows, so it costs what reading the weights costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from loka_serve.models.config import OneRecV2Config

BYTES = {"bf16": 2, "fp8": 1}
BF16_BYTES = BYTES["bf16"]


@dataclass(frozen=True)
class Ceilings:
    """What the GPU was measured to do: GEMM TFLOP/s in each precision, and GB/s of a copy (read plus written)."""

    bf16_tflops: float
    fp8_tflops: float
    gb_per_s: float

    def milliseconds(self, operation: Operation) -> float:
        tflops = self.bf16_tflops if operation.precision == "bf16" else self.fp8_tflops
        return max(operation.flops / tflops / 1e9, operation.traffic / self.gb_per_s / 1e6)


@dataclass(frozen=True)
class Operation:
    """One class of operations of a step; `traffic` in bytes, `precision` "bf16" or "fp8"."""

    name: str
    precision: str
    flops: float
    traffic: float


def floor_ms(
    config: OneRecV2Config,
    precision: str,
    batch: int,
    beam: int,
    context: int,
    ceilings: Ceilings,
    context_precision: str = "bf16",
) -> float:
    """Least milliseconds of `batch` requests with `context` history items and `beam` beams each.

    Args:
        precision: "bf16" or "fp8", of all GEMM sites.
        context_precision: of cross-attention's keys, values and products.
    """
    operations = list(context_operations(config, precision, batch, context, context_precision))
    for level in range(config.levels):
        operations += step_operations(config, precision, level, batch, beam, context, context_precision)
    return sum(map(ceilings.milliseconds, operations))


def context_operations(
    config: OneRecV2Config, precision: str, batch: int, context: int, context_precision: str = "bf16"
) -> Iterator[Operation]:
    """Embedding and projection of the histories, once a batch."""
    positions = batch * (1 + context)
    gathered = positions * config.d_model * BF16_BYTES * config.levels
    projection = _linear("context", precision, positions, config.d_context, config.d_model)
    # The embedded positions go straight into the product; what leaves are keys and values.
    written = positions * config.d_context * BYTES[context_precision]
    weight = config.d_context * config.d_model * BYTES[precision]
    yield Operation("context", precision, projection.flops, gathered + weight + written)


def step_operations(
    config: OneRecV2Config,
    precision: str,
    level: int,
    batch: int,
    beam: int,
    context: int,
    context_precision: str = "bf16",
) -> Iterator[Operation]:
    """The decode step that chooses the codes of `level`."""
    beams = [min(beam, math.prod(config.codebook_sizes[:position])) for position in range(level + 1)]
    rows = batch * beams[-1]
    d_model, inner = config.d_model, config.heads * config.head_dim
    sparse = sum(map(config.is_sparse, range(config.layers)))
    dense = config.layers - sparse

    # (how many, out, in); gate and up are one product.
    linears = [
        (config.layers, inner, d_model),
        (config.layers, d_model, inner),
        (config.layers, 3 * inner, d_model),
        (config.layers, d_model, inner),
        (dense, 2 * config.d_ff, d_model),
        (dense, d_model, config.d_ff),
        (sparse, config.experts, d_model),
    ]
    products = [(count, _linear("linears", precision, rows, n, k)) for count, n, k in linears]
    flops = sum(count * product.flops for count, product in products)
    yield Operation("linears", precision, flops, sum(count * product.traffic for count, product in products))
    if sparse:
        yield _experts(config, precision, rows, sparse)

    keys_values = batch * (1 + context) * config.kv_groups * config.head_dim * config.kv_split
    attention_bytes = keys_values * BYTES[context_precision] + 2 * rows * inner * BF16_BYTES
    attention_flops = 4 * rows * (1 + context) * inner
    yield Operation("attention", context_precision, config.layers * attention_flops, config.layers * attention_bytes)
    positions = rows * (level + 1)
    # Beams of one parent share what it left: a position has no more keys and values than it had beams.
    beam_bytes = (2 * batch * sum(beams) + 2 * rows) * inner * BF16_BYTES
    yield Operation("beams", "bf16", config.layers * 4 * positions * inner, config.layers * beam_bytes)

    codes = config.codebook_sizes[level]
    head = _linear("head", precision, rows, codes, d_model)
    yield Operation("head", precision, head.flops, head.traffic - rows * codes * BF16_BYTES)


def _linear(name: str, precision: str, rows: int, n: int, k: int) -> Operation:
    """A product of [rows, k] and [n, k]: inputs and weight in the recipe's precision, results in BF16."""
    return Operation(name, precision, 2 * rows * n * k, (n * k + rows * k) * BYTES[precision] + rows * n * BF16_BYTES)


def _experts(config: OneRecV2Config, precision: str, rows: int, layers: int) -> Operation:
    """Routed and shared experts of all sparse layers, from the tokens to their combined outputs."""
    width, d_model = config.expert_width, config.d_model
    slots = rows * (config.experts_per_token + config.shared_experts)
    untouched = (1 - config.experts_per_token / config.experts) ** rows
    matrices = 3 * (config.experts * (1 - untouched) + config.shared_experts)
    inputs, hidden, outputs = rows * d_model, 2 * slots * width, rows * d_model * BF16_BYTES
    traffic = (matrices * width * d_model + inputs + hidden) * BYTES[precision] + outputs
    return Operation("experts", precision, layers * 6 * slots * width * d_model, layers * traffic)
