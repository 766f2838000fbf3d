"""Router and sort at the 4B-A0.5B preset, as the block launches them, against torch; and a sweep of the tilings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..benchmarking import ROW_COUNTS, KernelRow, copies_beyond_l2, make_row, time_us
from . import baselines, reference
from .reference import SortedRows
from .routing import Router, RouterTiling, Routing, choose_tiling, route, route_and_sort, sort_rows
from .workload import D_MODEL, EXPERTS, ROUTED, SLOTS, TOP_K

Inputs = list[tuple[Router, Tensor]]
BLOCK_M = 64
CANDIDATES = tuple(
    RouterTiling(chunk, warps, stages)
    for chunk, warps, stages in product((16, 32, 64), (4, 8), (3, 4, 6))
    if chunk < 64 or stages < 6
)
JOINT_CANDIDATES = 64  # at most so many tokens are tried in one launch


def make_inputs(tokens: int) -> Inputs:
    """Tokens and routers (each with its own weight, as each layer has), so many that none is found in the cache."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    bias = torch.zeros(ROUTED, device="cuda")
    return [
        (Router(random(tokens, D_MODEL).bfloat16(), (random(ROUTED, D_MODEL) / math.sqrt(D_MODEL)).bfloat16()), bias)
        for _ in range(copies_beyond_l2(2 * D_MODEL * (tokens + ROUTED)))
    ]


def rows(tokens: Sequence[int] = ROW_COUNTS) -> Iterator[KernelRow]:
    """Fused router, sort, and both as the block runs them."""
    for count in tokens:
        inputs = make_inputs(count)
        routings = [(route(*given, TOP_K, 1),) for given in inputs]
        selections = [(torch_router(*given)[0].int(),) for given in inputs]
        flops = 2 * count * ROUTED * D_MODEL
        router_bytes = 2 * D_MODEL * (count + ROUTED) + 8 * count * SLOTS
        operations: dict[str, tuple[float, int, Callable[..., Any], Sequence[Any], str, Callable[..., Any], Any]] = {
            "moe_router_fused": (
                flops,
                router_bytes,
                lambda router, bias: route(router, bias, TOP_K, 1),
                inputs,
                "torch matmul, sigmoid, topk",
                torch_router,
                inputs,
            ),
            "moe_sort_chunks": (
                0,
                12 * count * SLOTS,
                lambda routing: sort_rows(routing, EXPERTS, BLOCK_M),
                routings,
                "torch argsort",
                lambda selected: baselines.torch_sort(selected, EXPERTS),
                selections,
            ),
            "moe_router_sort": (
                flops,
                router_bytes + 8 * count * SLOTS,
                lambda router, bias: route_and_sort(router, bias, TOP_K, 1, BLOCK_M),
                inputs,
                "torch matmul, sigmoid, topk, argsort",
                lambda router, bias: baselines.torch_sort(torch_router(router, bias)[0], EXPERTS),
                inputs,
            ),
        }
        errors = check(*inputs[0])
        for op, (operations_done, traffic, call, given, name, baseline, baseline_given) in operations.items():
            us, baseline_us = time_us(call, given), time_us(baseline, baseline_given)
            shape = f"{count} tokens, {EXPERTS} experts"
            yield make_row(op, shape, us, operations_done, traffic, (name, baseline_us), errors)


def torch_router(router: Router, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Product, sigmoid, topk, normalise, as eager PyTorch writes it; the shared expert, chosen by all, is left out."""
    logits = torch.mm(router.x, router.weight.T, out_dtype=torch.float32)
    return baselines.torch_route(logits, bias)


def check(router: Router, bias: Tensor) -> float:
    """Largest difference of slot weights from float64 ones, of tokens whose choice no rounding decides.

    Raises:
        RuntimeError: tokens clear of ties go to other experts, or to other rows.
    """
    logits = router.x.double() @ router.weight.double().T
    selected, weights = reference.route(logits.float(), bias, TOP_K, 1)
    scores = torch.sigmoid(logits).sort(dim=1, descending=True).values
    clear = (scores[:, :TOP_K] - scores[:, 1 : TOP_K + 1]).amin(1) > 1e-5
    routing = route(router, bias, TOP_K, 1)
    slot_weights, found = route_and_sort(router, bias, TOP_K, 1, BLOCK_M)
    expected = reference.sort_rows(routing.selected, EXPERTS, BLOCK_M)
    if not torch.equal(routing.selected[clear], selected[clear]) or not torch.equal(
        found.positions, expected.positions
    ):
        raise RuntimeError(f"router of {len(router.x)} tokens: other experts or rows than the reference's")
    return float((slot_weights - weights)[clear].abs().max())


def sweep(tokens: Sequence[int] = ROW_COUNTS) -> None:
    """Print a JSON line for each tiling: the router, the sort of its chunks, both in one replay, all in one launch."""
    for count in tokens:
        inputs = make_inputs(count)
        for tiling in CANDIDATES:

            def routed(router: Router, bias: Tensor, tiling: RouterTiling = tiling) -> Routing:
                return route(router, bias, TOP_K, 1, tiling)

            def routed_and_sorted(router: Router, bias: Tensor, tiling: RouterTiling = tiling) -> SortedRows:
                return sort_rows(route(router, bias, TOP_K, 1, tiling), EXPERTS, BLOCK_M)

            calls: dict[str, Callable[..., Any]] = {"router": routed, "both": routed_and_sorted}
            times = {f"{name}_us": round(time_us(call, inputs), 2) for name, call in calls.items()}
            chosen = tiling == choose_tiling(count)
            record = {"tokens": count, "chunk": tiling.chunk, "warps": tiling.warps, "stages": tiling.stages, **times}
            print(json.dumps(record | {"chosen": chosen}), flush=True)
        if count <= JOINT_CANDIDATES:

            def together(router: Router, bias: Tensor) -> object:
                return route_and_sort(router, bias, TOP_K, 1, BLOCK_M, JOINT_CANDIDATES)

            record = {"tokens": count, "one_launch_us": round(time_us(together, inputs), 2)}
            print(json.dumps(record), flush=True)
