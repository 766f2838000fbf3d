"""Scaling any channel group by powers of two leaves every logit as it is, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loka_serve.mods.channels import ChannelGroup, Part, exact_channels, power_of_two, tied_minimum
from loka_serve.mods.groups import channel_groups
from tests.mods.models import CONFIGS, TINY, answers, assert_same, make_model, parameters, workspace


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_group_is_exact_and_reversible(name: str, dtype: torch.dtype) -> None:
    model = make_model(CONFIGS[name], dtype)
    expected, before = answers(model), parameters(model)
    work = workspace(model)
    generator = torch.Generator().manual_seed(0)
    undo = []
    groups = channel_groups(model)
    for group in groups:
        changed = parameters(model)
        undo.append(work.rescale(group, torch.randint(-6, 7, group.shape, generator=generator)))
        assert undo[-1] is not None, group.name
        moved = {part.parameter for part in group.parts}
        for parameter, value in parameters(model).items():
            assert torch.equal(value, changed[parameter]) == (parameter not in moved), (group.name, parameter)
        assert_same(answers(model), expected)
    for step in reversed(undo):
        assert step is not None
        step()
    for parameter, value in parameters(model).items():
        assert torch.equal(value, before[parameter]), parameter


def test_which_groups_there_are() -> None:
    groups = {group.name: group for group in channel_groups(make_model(TINY))}
    readers = {name: [part.site for part in group.readers] for name, group in groups.items()}
    assert readers["layers.1.ffn_norm"] == [
        "layers.1.moe.router",
        "layers.1.moe.gate_up",
        "layers.1.moe.shared.gate_up",
    ]
    assert readers["layers.0.ffn_norm"] == ["layers.0.mlp.gate_up"]
    assert readers["norms.2"] == ["heads.2"]
    # Set 0 serves layers 0 and 1, set 1 layer 2; values are the second norm of each pair.
    assert readers["context.norms.1"] == ["layers.0.cross_attention.output", "layers.1.cross_attention.output"]
    assert readers["context.norms.3"] == ["layers.2.cross_attention.output"]
    assert groups["layers.1.moe.gate_up"].shape == (8, 64)
    # Every site's inputs belong to exactly one group.
    sites = [site for found in readers.values() for site in found]
    assert sorted(sites) == sorted(make_model(TINY).sites())
    block = channel_groups(make_model(dataclasses.replace(TINY, norm="block")))
    assert all(group.gain is None for group in block) and "norms.0" not in {group.name for group in block}


def test_inputs_are_followed() -> None:
    model = make_model(TINY)
    work = workspace(model)
    for group in channel_groups(model):
        work.rescale(group, torch.randint(-4, 5, group.shape, generator=torch.Generator().manual_seed(1)))
    fresh = workspace(model)
    for site in model.sites():
        rows, offsets = work.rows(site)
        expected, expected_offsets = fresh.rows(site)
        assert torch.equal(rows, expected), site
        assert offsets is None or torch.equal(offsets, expected_offsets)


def test_channels_that_would_leave_float16_are_left_alone() -> None:
    model = make_model(TINY, torch.float16)
    work = workspace(model)
    group = next(group for group in channel_groups(model) if group.name == "layers.0.ffn_norm")
    weight = model.layers[0].mlp.gate_up.weight
    assert weight is not None
    weight.data[0, 5] = 60000.0  # times 2 is infinite
    weight.data[0, 6] = 2.0**-24  # half of it is 0
    up = exact_channels(model, group, power_of_two(torch.full(group.shape, 1)))
    down = exact_channels(model, group, power_of_two(torch.full(group.shape, -1)))
    assert not up[5] and down[5] and up[6] and not down[6]
    before = parameters(model)
    undo = work.rescale(group, torch.full(group.shape, 1))
    assert undo is not None and weight.data[0, 5] == 60000.0
    undo()
    assert all(torch.equal(value, before[name]) for name, value in parameters(model).items())


def test_powers_of_two_and_ties() -> None:
    exponents = torch.arange(-126, 127)
    assert power_of_two(exponents).tolist() == [2.0**exponent for exponent in range(-126, 127)]
    assert tied_minimum(torch.tensor([3, -1, 2, 5]), torch.tensor([0, 1, 0, 1])).tolist() == [2, -1, 2, -1]
    part = Part("a.b.weight", -2, 0, torch.arange(2), True)
    assert ChannelGroup("a", (2,), (part,)).readers == () and part.site == "a.b"
