"""Readings of a real GPU's memory."""

from __future__ import annotations

import torch

from loka_serve.server.device_memory import read_device_memory


def test_what_the_allocator_holds_is_part_of_what_is_used() -> None:
    torch.cuda.empty_cache()
    before = read_device_memory("cuda")
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    after = read_device_memory("cuda")
    assert before is not None and after is not None
    assert after.reserved - before.reserved == held.numel()
    assert after.reserved <= after.used <= after.total == torch.cuda.get_device_properties(0).total_memory
