"""The reference model: sizes of the presets, decode steps against teacher forcing, masks, routing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loka_serve.errors import CheckpointError
from loka_serve.models.config import PRESETS, FeatureConfig, OneRecV2Config
from loka_serve.models.layers import BlockNorm, Linear, SparseMoE, rotate, swiglu
from loka_serve.models.onerec_v2 import DecodeCache, OneRecV2, count_parameters

# Two float32 evaluations of a 3-layer model in another order of summation; logits have standard deviation 1.
TOLERANCE = 1e-4

VARIANTS = {
    "tiny": PRESETS["tiny"],
    "rotary, keys are values": dataclasses.replace(
        PRESETS["tiny"], position_encoding="rotary", kv_split=1, kv_layers=1, kv_groups=4
    ),
    "dense, five unequal levels": dataclasses.replace(
        PRESETS["tiny"], experts=0, codebook_sizes=(7, 3, 11, 2, 5), kv_groups=1, short_term_length=3
    ),
    "features": dataclasses.replace(
        PRESETS["tiny"], codebook_sizes=(9, 8), features=(FeatureConfig("age", ("young", "old")),)
    ),
    "block norm, hard swish, biases": dataclasses.replace(
        PRESETS["tiny"], d_model=320, norm="block", activation="hard_swish", linear_bias=True
    ),
}


def build(config: OneRecV2Config, seed: int = 0) -> OneRecV2:
    model = OneRecV2(config).initialize(seed).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def random_batch(config: OneRecV2Config, batch: int, length: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    history = torch.stack(
        [torch.randint(0, size, (batch, length), generator=generator) for size in config.codebook_sizes], -1
    )
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    features = torch.zeros(batch, len(config.features), dtype=torch.long)
    return history, lengths, features


def test_preset_4b_counts_4b_parameters_and_half_a_billion_active() -> None:
    total, active = count_parameters(PRESETS["onerec-v2-4b-a0.5b"])
    assert 3.8e9 <= total <= 4.2e9
    assert 0.45e9 <= active <= 0.55e9


def test_preset_1b_counts_1b_parameters() -> None:
    total, _ = count_parameters(PRESETS["onerec-v2-1b"])
    assert 0.9e9 <= total <= 1.1e9


@torch.inference_mode()
@pytest.mark.parametrize("name", VARIANTS)
def test_decode_steps_equal_teacher_forcing(name: str) -> None:
    config = VARIANTS[name]
    model = build(config)
    history, lengths, features = random_batch(config, batch=3, length=10)
    targets = torch.stack([torch.randint(0, size, (3, 6)) for size in config.codebook_sizes], -1)
    context = model.prepare_context(history, lengths, features)
    forced = model.teacher_forced(context, targets, lengths[:, None].expand(-1, 6))
    cache = DecodeCache()
    for level in range(config.levels):
        tokens = None if level == 0 else targets[..., level - 1]
        if level == 1:
            cache.reorder(torch.zeros(3, 6, dtype=torch.long))
        logits = model.level_logits(model.decode_step(tokens, level, context, cache), level)
        assert logits.shape[-1] == config.codebook_sizes[level]
        torch.testing.assert_close(logits.expand_as(forced[level]), forced[level], atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_cutoffs_see_only_earlier_items() -> None:
    config = VARIANTS["rotary, keys are values"]
    model = build(config)
    history, _, features = random_batch(config, batch=2, length=12)
    targets = torch.zeros(2, 3, 3, dtype=torch.long)
    cutoffs = torch.tensor([[0, 5, 12], [3, 7, 1]])
    together = model.teacher_forced(model.prepare_context(history, torch.tensor([12, 12]), features), targets, cutoffs)
    for row in range(2):
        for column, cutoff in enumerate(cutoffs[row].tolist()):
            context = model.prepare_context(history[row : row + 1, :cutoff], torch.tensor([cutoff]), features[:1])
            alone = model.teacher_forced(context, targets[:1, :1], torch.tensor([[cutoff]]))
            for level in range(3):
                torch.testing.assert_close(
                    together[level][row, column], alone[level][0, 0], atol=TOLERANCE, rtol=TOLERANCE
                )


@torch.inference_mode()
def test_padding_does_not_matter_and_an_empty_history_works() -> None:
    config = PRESETS["tiny"]
    model = build(config)
    history, _, features = random_batch(config, batch=1, length=9)
    for length in (0, 4):
        exact = model.prepare_context(history[:, :length], torch.tensor([length]), features)
        padded = model.prepare_context(history, torch.tensor([length]), features)
        first = model.level_logits(model.decode_step(None, 0, exact, DecodeCache()), 0)
        second = model.level_logits(model.decode_step(None, 0, padded, DecodeCache()), 0)
        assert first.isfinite().all()
        torch.testing.assert_close(first, second, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_features_change_the_answer() -> None:
    config = VARIANTS["features"]
    model = build(config)
    history, lengths, _ = random_batch(config, batch=1, length=5)
    logits = []
    for index in (0, 1, 2):
        context = model.prepare_context(history, lengths, torch.tensor([[index]]))
        logits.append(model.level_logits(model.decode_step(None, 0, context, DecodeCache()), 0))
    assert not torch.allclose(logits[0], logits[1]) and not torch.allclose(logits[1], logits[2])
    assert config.features[0].index_of("old") == 2 and config.features[0].index_of("unheard of") == 0


def test_recency_context_refuses_earlier_cutoffs() -> None:
    config = PRESETS["tiny"]
    model = build(config)
    history, _, features = random_batch(config, batch=1, length=5)
    context = model.prepare_context(history, torch.tensor([5]), features)
    with pytest.raises(ValueError, match="rotary"):
        model.teacher_forced(context, torch.zeros(1, 1, 3, dtype=torch.long), torch.tensor([[3]]))


def test_rotation_depends_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 1, 8)

    def product(query_position: int, key_position: int) -> torch.Tensor:
        positions = torch.tensor([query_position]), torch.tensor([key_position])
        return (rotate(query[None], positions[0], 100.0) * rotate(key[None], positions[1], 100.0)).sum()

    torch.testing.assert_close(product(9, 4), product(105, 100), atol=1e-4, rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-4


def test_block_norm_normalises_each_block_alone_and_has_no_parameter() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 600, generator=generator)
    norm = BlockNorm(600, 1e-6)
    assert list(norm.parameters()) == []
    expected = torch.cat(
        [
            block / (block.square().mean(-1, keepdim=True) + 1e-6).sqrt()
            for block in (x[:, :256], x[:, 256:512], x[:, 512:])
        ],
        -1,
    )
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=1e-5)
    x[0, 10] = 1000.0  # an outlier takes nothing from the other blocks
    assert torch.equal(norm(x)[:, 256:], norm(torch.where(x == 1000.0, 0.0, x))[:, 256:])


def test_hard_swish_gate() -> None:
    gate, up = torch.tensor([-4.0, -3.0, -1.5, 0.0, 3.0, 5.0]), torch.full((6,), 2.0)
    expected = torch.tensor([0.0, 0.0, -0.75, 0.0, 6.0, 10.0])
    assert torch.equal(swiglu(torch.cat([gate, up]), "hard_swish"), expected)


def test_a_bias_is_added_to_the_product_in_float32() -> None:
    linear = Linear(4, 3, bias=True)
    linear.weight = torch.nn.Parameter(torch.eye(3, 4))
    linear.bias = torch.nn.Parameter(torch.tensor([0.5, -1.0, 0.0]))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert torch.equal(linear(x), torch.tensor([[1.5, 1.0, 3.0]]))
    linear.method = lambda rows: rows[:, :3] * 2
    assert torch.equal(linear(x), torch.tensor([[2.5, 3.0, 6.0]]))


def test_routing_bias_selects_but_does_not_weigh() -> None:
    torch.manual_seed(0)
    moe = SparseMoE(d_model=16, experts=6, experts_per_token=2, width=8, shared_experts=1)
    for parameter in moe.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(11, 16)
    moe.selection_bias.data[4] = 10.0
    selected, weights = moe.route(x)
    assert (selected[:, 0] == 4).all()
    scores = torch.sigmoid(moe.router(x))
    expected = scores.gather(1, selected)
    torch.testing.assert_close(weights, expected / expected.sum(1, keepdim=True))


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_moe_equals_a_loop_over_rows(rows: int) -> None:
    torch.manual_seed(rows)
    moe = SparseMoE(d_model=16, experts=6, experts_per_token=3, width=8, shared_experts=2)
    for parameter in moe.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(rows, 16)
    selected, weights = moe.route(x)
    assert moe.gate_up.weight is not None and moe.down.weight is not None and moe.shared is not None
    expected = moe.shared(x)
    for row in range(rows):
        for expert, weight in zip(selected[row].tolist(), weights[row], strict=True):
            gate, up = (moe.gate_up.weight[expert] @ x[row]).chunk(2)
            expected[row] += weight * (moe.down.weight[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-5)
    moe.dense = True
    torch.testing.assert_close(moe(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_groups": 3}, "kv_groups"),
        ({"kv_split": 3}, "kv_split"),
        ({"codebook_sizes": (5,)}, "codebook_sizes"),
        ({"experts_per_token": 9}, "experts_per_token"),
        ({"layers": 0}, "layers"),
        ({"d_ff": 0}, "d_ff"),
        ({"position_encoding": "sinus"}, "position_encoding"),
    ],
)
def test_bad_configuration_names_the_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(CheckpointError, match=f"config {field} = .* expected"):
        OneRecV2Config.from_dict({**PRESETS["tiny"].to_dict(), **change})


def test_configuration_round_trip_and_unknown_keys() -> None:
    for config in (*PRESETS.values(), *VARIANTS.values()):
        assert OneRecV2Config.from_dict(config.to_dict()) == config
    with pytest.raises(CheckpointError, match="unknown keys.*widht"):
        OneRecV2Config.from_dict({**PRESETS["tiny"].to_dict(), "widht": 3})
    with pytest.raises(CheckpointError, match="model_type"):
        OneRecV2Config.from_dict({**PRESETS["tiny"].to_dict(), "model_type": "llama"})
