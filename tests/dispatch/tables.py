"""Dispatch tables as a measurement would leave them, of a model's shapes, with scripted times."""

from __future__ import annotations

from collections.abc import Callable

import torch

from loka_serve.dispatch.sites import ROWS, names_of_work, shapes_to_measure, work_of_sites
from loka_serve.kernels.dispatch import Dispatch, Entry, Environment, Shape
from loka_serve.models.config import OneRecV2Config

H200 = Environment("NVIDIA H200", "580.1", "13.0", "2.11.0", "triton 3.6.0", None)
BF16_US = 10.0


def table(config: OneRecV2Config, us: Callable[[Shape], float], mere: float = 0.08) -> Dispatch:
    """Every shape of the model in every recipe; BF16 takes 10 us, others what `us` says, a second library 1 us more."""
    works = names_of_work(work_of_sites(config))
    entries = {}
    for shape in shapes_to_measure(works, ROWS):
        time = BF16_US if shape.recipe == "bf16" else us(shape)
        names = ("Tiling(16)", "DeepGemm()") if shape.op == "experts" else ("torch", "torch_fast")
        errors = dict.fromkeys(names, 0.005 if shape.recipe == "bf16" else mere)
        entries[shape] = Entry({names[0]: time, names[1]: time + 1.0}, BF16_US, errors)
    sites = {work.key: name for work, name in works.items()}
    libraries = {"cublaslt": "CUDA 13.0", "fbgemm": "absent: No module named 'fbgemm_gpu'"}
    return Dispatch(torch.device("cpu"), H200, entries, libraries=libraries, sites=sites)
