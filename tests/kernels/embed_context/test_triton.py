"""The kernel equals its reference, and that the model: in Triton's interpreter, on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from loka_serve.kernels.embed_context import reference
from loka_serve.kernels.quantize.tilings import RowTiling
from loka_serve.models.config import FeatureConfig, OneRecV2Config
from loka_serve.models.onerec_v2 import ContextProcessor
from tests.kernels.devices import DEVICE, compile_for_hopper, needs_triton
from tests.kernels.embed_context.cases import make_arguments


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "items", "levels", "width"),
    [([3, 0, 5], 5, 3, 192), ([4], 4, 2, 65), ([2, 7], 7, 5, 128), ([1, 2], 3, 4, 64), ([0], 0, 3, 64)],
)
@pytest.mark.parametrize(("recency", "short_term_length"), [(True, 0), (False, 2), (True, 3), (False, 0)])
def test_equals_reference_bit_for_bit(
    lengths: list[int], items: int, levels: int, width: int, recency: bool, short_term_length: int
) -> None:
    from loka_serve.kernels.embed_context.triton import embed_context, embed_context_quantize

    arguments = make_arguments(lengths, items, levels, width, DEVICE, recency, short_term_length)
    expected = reference.embed_context(*arguments)
    assert torch.equal(embed_context(*arguments), expected)
    assert torch.equal(embed_context(*arguments, tiling=RowTiling(4, 2)), expected)
    for block_scales in (False, True):
        codes, scale = embed_context_quantize(*arguments, block_scales)
        expected_codes, expected_scale = reference.embed_context_quantize(*arguments, block_scales)
        assert torch.equal(codes.float(), expected_codes.float()) and torch.equal(scale, expected_scale)
        assert codes.float().isfinite().all() and scale.isfinite().all()


@pytest.mark.parametrize("position_encoding", ["recency", "rotary"])
def test_reference_equals_the_model(position_encoding: str) -> None:
    config = OneRecV2Config(
        d_model=24,
        layers=1,
        heads=1,
        head_dim=16,
        d_ff=8,
        codebook_sizes=(7, 7, 7),
        max_context=6,
        position_encoding=position_encoding,
        short_term_length=2,
        features=(FeatureConfig("sex", ("f", "m")), FeatureConfig("tier", ("a",))),
    )
    module = ContextProcessor(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        # Values of bfloat16 in float32, so that the model does not round either.
        parameter.data = torch.randn(parameter.shape, generator=generator).bfloat16().float()
    seen: list[torch.Tensor] = []
    module.projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    history = torch.randint(0, 7, (3, 6, 3), generator=generator).int()
    lengths = torch.tensor([6, 1, 4], dtype=torch.int32)
    features = torch.tensor([[0, 1], [2, 0], [1, 1]], dtype=torch.int32)
    module(history.long(), lengths.long(), features.long())

    def weight(table: torch.nn.Module) -> torch.Tensor:
        return table.weight.data.bfloat16()

    static = reference.embed_static(
        features, [weight(table) for table in module.feature_embeddings], module.static.data.bfloat16()
    )
    found = reference.embed_context(
        history,
        lengths,
        [weight(table) for table in module.item_embeddings],
        static,
        weight(module.recency_embedding) if position_encoding == "recency" else None,
        weight(module.segment_embedding),
        config.short_term_length,
    ).view(3, 7, -1)
    for request, length in enumerate(lengths.tolist()):
        assert torch.equal(found[request, : 1 + length], seen[0][request, : 1 + length].bfloat16())
        assert (found[request, 1 + length :] == 0).all()


def test_static_position_without_features() -> None:
    static = torch.randn(8).bfloat16()
    found = reference.embed_static(torch.zeros(3, 0, dtype=torch.int32), [], static)
    assert torch.equal(found, static.expand(3, -1)) and found.shape == (3, 8)


@needs_triton
def test_wrong_arguments_are_named() -> None:
    from loka_serve.kernels.embed_context.triton import embed_context

    arguments = make_arguments([2], 3, 3, 64, DEVICE, short_term_length=1)
    history, lengths, tables, static, recency, segment, short = arguments
    for name, wrong in (
        ("history", (history.long(), *arguments[1:])),
        ("history", (history, lengths, tables[:2], *arguments[3:])),
        ("tables", (history[..., :1].contiguous(), lengths, tables[:1], *arguments[3:])),
        ("lengths", (history, lengths.long(), *arguments[2:])),
        ("static", (history, lengths, tables, static.float(), *arguments[4:])),
        (r"tables\[2\]", (history, lengths, [*tables[:2], tables[2][:, :9]], *arguments[3:])),
        ("recency", (*arguments[:4], recency.float() if recency is not None else None, segment, short)),
        ("segment: expected 2 rows", (*arguments[:5], tables[0], short)),
    ):
        with pytest.raises(ValueError, match=name):
            embed_context(*wrong)


@needs_triton
def test_compiles_for_hopper() -> None:
    from loka_serve.kernels.embed_context.triton import embed_context_kernel

    tables = [*(f"table_{level}_ptr" for level in range(5)), "static_ptr", "recency_ptr", "segment_ptr"]
    numbers = ("scale_row_stride", "scale_block_stride", "items", "ages", "short_term_length")
    compile_for_hopper(
        embed_context_kernel,
        signature={"history_ptr": "*i32", "lengths_ptr": "*i32", "scale_ptr": "*fp32"}
        | dict.fromkeys(tables, "*bf16")
        | dict.fromkeys(numbers, "i32"),
        configurations=[
            {"LEVELS": levels, "WIDTH": 1408, "BLOCKS": 16, "ROWS": rows, "RECENCY": recency, "SEGMENT": not recency}
            | {"SCALES": scales, "out_ptr": out}
            for levels, rows, recency in ((2, 1, True), (3, 4, True), (5, 4, False))
            for scales, out in ((0, "*bf16"), (1, "*fp8e4nv"), (2, "*fp8e4nv"))
        ],
    )
