"""The model of a bundle as one ONNX graph: context, every level's decode step and selection, a whole request.

Dense parts are operations of ONNX. What TensorRT lacks on Hopper, or what works on ragged requests and the catalog, are
nodes of domain `loka` (version 1):

* `EmbedContext`: histories and features -> one row a context position, the sum of its embeddings.
* `RotateKeys`: rotary positions of a context's keys.
* `BeamAttention`: the beams' queries over the context of their request, turned by their position if that is rotary.
* `SelfBeamAttention`: the beams over their own earlier levels, whose keys and values it keeps from level to level.
* `MoE`: router, experts, shared expert and the residual.
* `LevelSelect`: logits -> the best legal children of the beams, through the catalog's trie and the request's filter.

A site in `fp8_tensor` is a QuantizeLinear and DequantizeLinear with the calibrated scale, a weight in E4M3 [out, in]
with a scale a channel, dequantized and transposed, and a MatMul: the form that TensorRT fuses into one FP8 product.
Logits are multiplied in float32 from bfloat16 or E4M3 numbers, since bfloat16 sums would tie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from loka_serve.engines.tensorrt.builder import ONNX_TYPES, GraphBuilder, Value
from loka_serve.engines.tensorrt.schemas import LOKA_DOMAIN
from loka_serve.engines.tensorrt.steps import BATCH, BEAMS, CONTEXT
from loka_serve.engines.tensorrt.support import check_plan
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.layers import NORM_BLOCK
from loka_serve.quantization.plan import PrecisionPlan
from loka_serve.tensor_files import TensorPlace


def build_graph(
    config: OneRecV2Config, plan: PrecisionPlan, tensors: Mapping[str, TensorPlace], dtype: str
) -> onnx.ModelProto:
    """The graph of a bundle.

    Args:
        tensors: its weights, which the graph's external data points to, see `bundle_tensors`.
        dtype: of what flows between operations: `bfloat16`, `float16`, or `float32` with inputs and weights of BF16
            sites rounded to bfloat16, for runtimes that multiply no bfloat16.

    Raises:
        EngineError: a recipe that Q/DQ nodes cannot express; names the site.
    """
    check_plan(plan)
    return _GraphWriter(config, plan, GraphBuilder(tensors), dtype).write()


@dataclass(frozen=True)
class _Requests:
    """Inputs that nodes of domain `loka` read."""

    lengths: Value
    beam_widths: Value
    filtered: Value


@dataclass(frozen=True)
class _Beams:
    """What a level's selection leaves to the next level; before the first there are only counts."""

    counts: Value
    codes: Value
    nodes: Value | None = None
    scores: Value | None = None
    failed: Value | None = None
    ancestors: Value | None = None


class _GraphWriter:
    def __init__(self, config: OneRecV2Config, plan: PrecisionPlan, builder: GraphBuilder, dtype: str) -> None:
        self.config, self.plan, self.builder, self.dtype = config, plan, builder, dtype
        self.keys: list[tuple[Value, Value]] = []
        self.cache: dict[int, tuple[Value, Value]] = {}

    def write(self) -> onnx.ModelProto:
        config, builder = self.config, self.builder
        requests = _Requests(
            builder.input("lengths", "int32", BATCH),
            builder.input("beam_widths", "int32", BATCH),
            builder.input("filtered", "int32", BATCH),
        )
        # 1 where there is a request, and the code before the first, which is always 0.
        beams = _Beams(builder.input("present", "int32", BATCH), builder.input("begin", "int32", BATCH))
        self._context(requests)
        for level in range(config.levels):
            logits = self._step(level, beams, requests)
            beams = self._select(level, logits, beams, requests)
        outputs = [beams.nodes, beams.scores, beams.counts, beams.failed]
        return builder.model("onerec_v2", [value for value in outputs if value is not None])

    # once a request

    def _context(self, requests: _Requests) -> None:
        config, builder = self.config, self.builder
        history = builder.input("history", "int32", BATCH, "items", config.levels)
        features = builder.input("features", "int32", BATCH, len(config.features))
        tables = [name for name in builder.tensors if name.startswith("context.") and "embedding" in name]
        weights = [builder.weight(name) for name in ("context.static", *tables)]
        embedded = Value("context.embedded", self.dtype, (CONTEXT, config.d_model))
        names = " ".join(weight.name for weight in weights)
        self._loka("EmbedContext", [history, requests.lengths, features, *weights], [embedded], weights=names)
        projected = self._linear(embedded, "context.projection", "context.projected")
        parts = config.kv_layers * config.kv_split
        width = config.kv_groups * config.head_dim
        chunks = [Value(f"context.chunk.{index}", self.dtype, (CONTEXT, width)) for index in range(parts)]
        builder.node("Split", [projected], chunks, axis=-1, num_outputs=parts)
        normed = [
            self._norm(chunk, f"context.norms.{index}", f"context.normed.{index}") for index, chunk in enumerate(chunks)
        ]
        for index in range(config.kv_layers):
            key, value = normed[index * config.kv_split], normed[(index + 1) * config.kv_split - 1]
            if config.position_encoding == "rotary":
                rotated = Value(f"context.keys.{index}", self.dtype, (CONTEXT, width))
                self._loka(
                    "RotateKeys",
                    [key, requests.lengths],
                    [rotated],
                    groups=config.kv_groups,
                    head_dim=config.head_dim,
                    theta=config.rotary_theta,
                )
                key = rotated
            self.keys.append((key, value))

    # once a level

    def _step(self, level: int, beams: _Beams, requests: _Requests) -> Value:
        config, builder = self.config, self.builder
        rows = BATCH if level == 0 else BEAMS
        prefix = f"level{level}."
        if level == 0:
            table = builder.weight("bos", (1, config.d_model))
        else:
            table = builder.weight(f"token_embeddings.{level - 1}.weight")
        # The same name at every level, so that what follows is the same segment.
        name = f"{prefix}token" if table.dtype == self.dtype else f"{prefix}embedded"
        looked_up = builder.one("Gather", [table, beams.codes], name, table.dtype, (rows, config.d_model), axis=0)
        x = builder.cast(looked_up, self.dtype, f"{prefix}token")
        for layer in range(config.layers):
            x = self._block(prefix, layer, level, x, beams, requests)
        # A scope of its own: the splitter cuts here, so that the levels share the segments before.
        head = f"head{level}."
        normed = self._norm(x, f"norms.{level}", f"{head}normed")
        return self._linear(normed, f"heads.{level}", f"{head}logits", "float32")

    def _block(self, prefix: str, layer: int, level: int, x: Value, beams: _Beams, requests: _Requests) -> Value:
        config = self.config
        weights, names = f"layers.{layer}.", f"{prefix}layers.{layer}."
        rows, width = x.shape[0], config.heads * config.head_dim
        normed = self._norm(x, f"{weights}cross_attention_norm", f"{names}cross_attention.normed")
        query = self._linear(normed, f"{weights}cross_attention.query", f"{names}cross_attention.query")
        attended = Value(f"{names}cross_attention.attended", self.dtype, (rows, width))
        kv_set = layer * config.kv_layers // config.layers
        shape = {"heads": config.heads, "head_dim": config.head_dim}
        theta = config.rotary_theta if config.position_encoding == "rotary" else 0.0
        self._loka(
            "BeamAttention",
            [query, *self.keys[kv_set], requests.lengths, beams.counts],
            [attended],
            groups=config.kv_groups,
            kv_set=kv_set,
            theta=theta,
            **shape,
        )
        x = self._project(attended, x, f"{weights}cross_attention.output", f"{names}cross_attention")

        normed = self._norm(x, f"{weights}self_attention_norm", f"{names}self_attention.normed")
        qkv = self._linear(normed, f"{weights}self_attention.qkv", f"{names}self_attention.qkv")
        attended = Value(f"{names}self_attention.attended", self.dtype, (rows, width))
        past = self.cache.get(layer, (None, None))
        cache_shape = (config.levels - 1, BATCH, "beams", config.heads, config.head_dim)
        kept = tuple(Value(f"{names}self_attention.{part}", self.dtype, cache_shape) for part in ("keys", "values"))
        self.cache[layer] = (kept[0], kept[1])
        self._loka(
            "SelfBeamAttention", [qkv, beams.counts, beams.ancestors, *past], [attended, *kept], level=level, **shape
        )
        x = self._project(attended, x, f"{weights}self_attention.output", f"{names}self_attention")

        normed = self._norm(x, f"{weights}ffn_norm", f"{names}ffn.normed")
        if config.is_sparse(layer):
            return self._experts(weights, names, layer, normed, x)
        gate_up = self._linear(normed, f"{weights}mlp.gate_up", f"{names}mlp.gate_up")
        hidden = self._swiglu(gate_up, f"{names}mlp")
        return self._project(hidden, x, f"{weights}mlp.down", f"{names}mlp")

    def _experts(self, weights: str, names: str, layer: int, normed: Value, residual: Value) -> Value:
        config, builder = self.config, self.builder
        taken = [builder.weight(name) for name in builder.tensors if name.startswith(f"{weights}moe.")]
        out = Value(f"{names}moe.total", self.dtype, residual.shape)
        recipes = {
            site.removeprefix(f"{weights}moe."): recipe
            for site, recipe in self.plan.recipes.items()
            if site.startswith(f"{weights}moe.")
        }
        self._loka(
            "MoE",
            [normed, residual, *taken],
            [out],
            layer=layer,
            experts=config.experts,
            experts_per_token=config.experts_per_token,
            activation=config.activation,
            weights=" ".join(value.name for value in taken),
            recipes=" ".join(f"{site}={recipe}" for site, recipe in recipes.items()),
        )
        return out

    def _select(self, level: int, logits: Value, beams: _Beams, requests: _Requests) -> _Beams:
        builder = self.builder
        first_child = builder.input(f"first_child_{level}", "int32", f"parents_{level}")
        codes = builder.input(f"codes_{level}", "int32", f"nodes_{level}")
        allowed = builder.input(f"allowed_{level}", "int32", BATCH, f"words_{level}")
        prefix = f"level{level}.beams."
        chosen = _Beams(
            counts=Value(f"{prefix}counts", "int32", (BATCH,)),
            codes=Value(f"{prefix}codes", "int32", (BEAMS,)),
            nodes=Value(f"{prefix}nodes", "int32", (BATCH, "beams")),
            scores=Value(f"{prefix}scores", "float32", (BATCH, "beams")),
            failed=Value(f"{prefix}failed", "int32", (BATCH,)),
            ancestors=Value(f"{prefix}ancestors", "int32", (BATCH, "beams", level + 1)),
        )
        taken = [logits, beams.counts, requests.beam_widths, beams.nodes, beams.scores, beams.failed, beams.ancestors]
        given = [chosen.counts, chosen.codes, chosen.nodes, chosen.scores, chosen.failed, chosen.ancestors]
        self._loka(
            "LevelSelect",
            [*taken, first_child, codes, allowed, requests.filtered],
            [value for value in given if value is not None],
            level=level,
            in_sid_order=int(level + 1 < self.config.levels),
        )
        return chosen

    # operations

    def _linear(self, x: Value, site: str, name: str, out: str | None = None) -> Value:
        """x W^T of a site, with its bias if it has one, in the type `out` (that of the graph by default)."""
        builder, out = self.builder, out or self.dtype
        if self.plan[site] == "fp8_tensor":
            inputs, weight = self._quantized(x, site, name, out)
        else:
            inputs, weight = self._rounded(x, site, name, out)
        features = weight.shape[0]
        transposed = builder.one(
            "Transpose", [weight], f"{name}.weight_t", out, (weight.shape[1], features), perm=[1, 0]
        )
        bias = f"{site}.bias"
        shape = (x.shape[0], features)
        product = builder.one(
            "MatMul", [inputs, transposed], f"{name}.product" if bias in builder.tensors else name, out, shape
        )
        if bias not in builder.tensors:
            return product
        wide = builder.cast(product, "float32", f"{name}.wide")
        total = name if out == "float32" else f"{name}.biased"
        biased = builder.one("Add", [wide, builder.weight(bias)], total, "float32", shape)
        return builder.cast(biased, out, name)

    def _quantized(self, x: Value, site: str, name: str, out: str) -> tuple[Value, Value]:
        builder = self.builder
        scale, weight = builder.weight(f"{site}.input_scale"), builder.weight(f"{site}.weight")
        e4m3, wide = ONNX_TYPES["float8_e4m3fn"], {"output_dtype": ONNX_TYPES[out]}
        codes = builder.one(
            "QuantizeLinear", [x, scale], f"{name}.codes", "float8_e4m3fn", x.shape, output_dtype=e4m3, saturate=1
        )
        inputs = builder.one("DequantizeLinear", [codes, scale], f"{name}.inputs", out, x.shape, **wide)
        scales = builder.weight(f"{site}.weight_scale")
        rows = builder.one("DequantizeLinear", [weight, scales], f"{name}.weight", out, weight.shape, axis=0, **wide)
        return inputs, rows

    def _rounded(self, x: Value, site: str, name: str, out: str) -> tuple[Value, Value]:
        builder = self.builder
        weight = builder.weight(f"{site}.weight")
        if self.dtype == "float32":
            x = builder.cast(x, "bfloat16", f"{name}.rounded")
        return builder.cast(x, out, f"{name}.inputs"), builder.cast(weight, out, f"{name}.weight")

    def _project(self, x: Value, residual: Value, site: str, name: str) -> Value:
        output = self._linear(x, site, f"{name}.output")
        return self.builder.one("Add", [residual, output], f"{name}.total", self.dtype, residual.shape)

    def _norm(self, x: Value, weight: str, name: str) -> Value:
        """The model's norm in float32, rounded once."""
        builder = self.builder
        wide = builder.cast(x, "float32", f"{name}.wide")
        result = name if self.dtype == "float32" else f"{name}.float32"
        if self.config.norm == "rms":
            normed = self._rms(wide, builder.weight(f"{weight}.weight"), result)
            return builder.cast(normed, self.dtype, name)
        features = x.shape[-1]
        assert isinstance(features, int)
        widths = [min(NORM_BLOCK, features - start) for start in range(0, features, NORM_BLOCK)]
        blocks = [Value(f"{name}.block{index}", "float32", (x.shape[0], width)) for index, width in enumerate(widths)]
        sizes = builder.constant(f"block_sizes_{features}", np.array(widths, np.int64))
        builder.node("Split", [wide, sizes], blocks, axis=-1)
        parts = []
        for block in blocks:
            width = block.shape[-1]
            assert isinstance(width, int)
            ones = builder.constant(f"ones_{width}", np.ones(width, np.float32))
            parts.append(self._rms(block, ones, f"{block.name}.normed"))
        joined = builder.one("Concat", parts, result, "float32", x.shape, axis=-1)
        return builder.cast(joined, self.dtype, name)

    def _rms(self, x: Value, gain: Value, name: str) -> Value:
        return self.builder.one(
            "RMSNormalization", [x, gain], name, "float32", x.shape, axis=-1, epsilon=self.config.norm_eps
        )

    def _swiglu(self, gate_up: Value, name: str) -> Value:
        builder, width = self.builder, gate_up.shape[-1]
        assert isinstance(width, int)
        shape = (gate_up.shape[0], width // 2)
        wide = builder.cast(gate_up, "float32", f"{name}.wide")
        gate, up = Value(f"{name}.gate", "float32", shape), Value(f"{name}.up", "float32", shape)
        builder.node("Split", [wide], [gate, up], axis=-1, num_outputs=2)
        if self.config.activation == "hard_swish":
            active = builder.one("HardSwish", [gate], f"{name}.active", "float32", shape)
        else:
            sigmoid = builder.one("Sigmoid", [gate], f"{name}.sigmoid", "float32", shape)
            active = builder.one("Mul", [gate, sigmoid], f"{name}.active", "float32", shape)
        result = f"{name}.hidden" if self.dtype == "float32" else f"{name}.hidden32"
        return builder.cast(builder.one("Mul", [active, up], result, "float32", shape), self.dtype, f"{name}.hidden")

    def _loka(
        self, operation: str, inputs: list[Value | None], outputs: list[Value], **attributes: int | float | str
    ) -> None:
        self.builder.node(operation, inputs, outputs, domain=LOKA_DOMAIN, **attributes)
