"""The operations of a dense segment in torch. Dequantizations wait for their product, which multiplies the codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka_serve.kernels.quantize.reference import quantize_static_e4m3

ALIGNMENT = 16
"""torch._scaled_mm takes widths that are multiples of it."""


@dataclass(frozen=True)
class Deferred:
    """A tensor that is to be `dtype` once something but a product needs it.

    Attributes:
        stored: E4M3 codes with `scale`, float32 [] or one a row of `stored`; or bfloat16 without.
        transposed: the value is that of `stored` with its two dimensions exchanged.
    """

    stored: Tensor
    dtype: torch.dtype
    scale: Tensor | None = None
    transposed: bool = False

    def resolve(self) -> Tensor:
        value = self.stored.float() if self.scale is not None else self.stored.to(self.dtype)
        if self.scale is not None:
            value = value * (self.scale if self.scale.ndim == 0 else self.scale[:, None])
        value = value.to(self.dtype)
        return value.T if self.transposed else value


Value = Tensor | Deferred
Operation = Callable[[Sequence[Value], Mapping[str, Any]], Sequence[Value]]


def tensor(value: Value) -> Tensor:
    return value.resolve() if isinstance(value, Deferred) else value


def _cast(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    value, dtype = tensor(inputs[0]), attributes["to"]
    if value.dtype == torch.bfloat16 and dtype == torch.float32 and value.ndim == 2:
        return [Deferred(value, dtype)]
    return [value.to(dtype)]


def _gather(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    return [tensor(inputs[0]).index_select(0, tensor(inputs[1]))]


def _rms_normalization(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    x, gain = map(tensor, inputs)
    return [F.rms_norm(x, gain.shape, gain, attributes["epsilon"])]


def _quantize(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    x, scale = map(tensor, inputs)
    return [quantize_static_e4m3(x, scale)]


def _dequantize(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    codes, scale = map(tensor, inputs)
    return [Deferred(codes, attributes["output_dtype"], scale)]


def _transpose(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    value = inputs[0]
    if isinstance(value, Deferred):
        return [Deferred(value.stored, value.dtype, value.scale, not value.transposed)]
    return [value.T]


def _matmul(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    x, weight = inputs
    if isinstance(x, Deferred) and isinstance(weight, Deferred) and weight.transposed and weight.stored.is_cuda:
        product = _multiply_stored(x, weight)
        if product is not None:
            return [product]
    return [tensor(x) @ tensor(weight)]


def _multiply_stored(x: Deferred, weight: Deferred) -> Tensor | None:
    """The product of what is stored; None where torch has no such product."""
    rows = x.stored.shape[0]
    if x.scale is None and weight.scale is None:
        return torch.mm(x.stored, weight.stored.T, out_dtype=torch.float32)
    if x.scale is None or weight.scale is None or x.dtype != torch.bfloat16:
        return None
    if any(width % ALIGNMENT for width in weight.stored.shape):
        return None
    # One scale repeated: only a product with a scale a row allows the weight's scale a channel.
    scales = x.scale.expand(rows).contiguous()[:, None]
    return torch._scaled_mm(x.stored, weight.stored.T, scales, weight.scale[None, :], out_dtype=torch.bfloat16)


def _split(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    x = tensor(inputs[0])
    if "num_outputs" in attributes:
        return x.chunk(attributes["num_outputs"], attributes["axis"])
    return x.split(attributes["split"], attributes["axis"])


def _concat(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    return [torch.cat([tensor(value) for value in inputs], attributes["axis"])]


def _add(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    return [tensor(inputs[0]) + tensor(inputs[1])]


def _multiply(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    return [tensor(inputs[0]) * tensor(inputs[1])]


def _sigmoid(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    return [torch.sigmoid(tensor(inputs[0]))]


def _hard_swish(inputs: Sequence[Value], attributes: Mapping[str, Any]) -> Sequence[Value]:
    return [F.hardswish(tensor(inputs[0]))]


OPERATIONS: dict[str, Operation] = {
    "Add": _add,
    "Cast": _cast,
    "Concat": _concat,
    "DequantizeLinear": _dequantize,
    "Gather": _gather,
    "HardSwish": _hard_swish,
    "MatMul": _matmul,
    "Mul": _multiply,
    "QuantizeLinear": _quantize,
    "RMSNormalization": _rms_normalization,
    "Sigmoid": _sigmoid,
    "Split": _split,
    "Transpose": _transpose,
}
"""By ONNX name; attributes hold torch types in place of ONNX's, and `split` the sizes where they are an input."""
