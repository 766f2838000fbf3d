"""Channel groups: channels that can be scaled where they are made and scaled back where a GEMM reads them.

If the producers of channel j are divided by s_j and the columns of all weights that read it are multiplied by s_j, the
function stays as it is. With s_j a power of two every product and sum on the way is the same number with another
exponent, so results are equal bit for bit; entries that would leave their dtype's range are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka_serve.models.onerec_v2 import OneRecV2

LARGEST_EXPONENT = 14
"""Of two: no scale leaves float16, whose largest number is below 2**16."""
PIECE_VALUES = 1 << 18


@dataclass(frozen=True)
class Part:
    """Entries of one parameter that belong to a group's channels.

    Attributes:
        parameter: its name, `layers.0.mlp.down.weight` for example.
        axis: -1 for columns (or a vector), -2 for rows.
        start: first entry on that axis.
        channels: int64 [n], channel of each of the n entries from `start` on.
        multiplied: by the scale (a reader); otherwise divided by it (a producer).
    """

    parameter: str
    axis: int
    start: int
    channels: Tensor
    multiplied: bool

    @property
    def site(self) -> str:
        return self.parameter.removesuffix(".weight")


@dataclass(frozen=True)
class ChannelGroup:
    """Channels between a producer and the GEMMs that read them.

    Attributes:
        name: of the producer.
        shape: of the scales: (width,), or (experts, width) where each expert has channels of its own.
        parts: everything that is scaled.
        readers: those of the parts that are columns of sites, whose inputs are divided by the scale.
        gain: name of the norm's gain that produces the channels; None for other producers.
        ties: int64 [width], channels with equal entries need equal scales; None where all are free.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    gain: str | None = None
    ties: Tensor | None = None

    @property
    def readers(self) -> tuple[Part, ...]:
        columns = (part for part in self.parts if part.multiplied and part.axis == -1)
        return tuple(part for part in columns if part.parameter.endswith(".weight"))


def scale_channels(model: OneRecV2, group: ChannelGroup, scales: Tensor, invert: bool = False) -> None:
    """Scale all parts of a group in place, in float32, a piece at a time.

    Args:
        scales: float32 `group.shape` on the CPU, none of them 0. Powers of two are exact if `exact_channels` says so.
        invert: take back the same scales.
    """
    for part in group.parts:
        for piece in _pieces(model, part, scales):
            values, factor = piece.entries.float(), piece.factors
            piece.entries.copy_(values.mul_(factor) if part.multiplied != invert else values.div_(factor))


def exact_channels(model: OneRecV2, group: ChannelGroup, scales: Tensor) -> Tensor:
    """Bool `group.shape`, on the CPU as scales are: channels whose entries come back when scaled back."""
    exact = torch.ones(group.shape, dtype=torch.bool)
    for part in group.parts:
        for piece in _pieces(model, part, scales):
            entries, factor = piece.entries, piece.factors
            scaled = (entries.float() * factor if part.multiplied else entries.float() / factor).to(entries.dtype)
            back = scaled.float() / factor if part.multiplied else scaled.float() * factor
            lossy = (back.to(entries.dtype) != entries) | ~scaled.isfinite()
            if entries.ndim == 2:
                lossy = lossy.any(0 if part.axis == -1 else 1)
            row = exact[piece.expert] if exact.ndim == 2 else exact
            row[piece.channels[lossy.cpu()]] = False
    return exact if group.ties is None else tied_minimum(exact.int(), group.ties).bool()


def power_of_two(exponents: Tensor) -> Tensor:
    """2 ** exponents as float32, exactly: the exponent bits are written, nothing is computed. Any integers in +-126."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def tied_minimum(values: Tensor, ties: Tensor) -> Tensor:
    """Each channel's value replaced by the smallest of those that it is tied to; values [width]."""
    smallest = torch.full_like(values, torch.iinfo(values.dtype).max)
    return smallest.scatter_reduce(0, ties, values, "amin")[ties]


@dataclass(frozen=True)
class _Piece:
    """Rows of one matrix, or a vector: a view of its entries, the scales that broadcast over it, their channels."""

    entries: Tensor
    factors: Tensor
    channels: Tensor
    expert: int


def _pieces(model: OneRecV2, part: Part, scales: Tensor) -> Iterator[_Piece]:
    """A part's entries in pieces: the float32 copies made of one are small beside any weight."""
    entries = model.get_parameter(part.parameter).data.narrow(part.axis, part.start, len(part.channels))
    factors = scales[..., part.channels].to(entries.device)
    if entries.ndim == 1:
        yield _Piece(entries, factors, part.channels, 0)
        return
    for expert, matrix in enumerate(entries if entries.ndim == 3 else entries[None]):
        factor = factors[expert] if factors.ndim == 2 else factors
        rows = max(1, PIECE_VALUES // max(1, matrix.shape[1]))
        for start in range(0, len(matrix), rows):
            span = slice(start, start + rows)
            if part.axis == -1:
                yield _Piece(matrix[span], factor, part.channels, expert)
            else:
                yield _Piece(matrix[span], factor[span, None], part.channels[span], expert)
