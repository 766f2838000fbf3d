"""Random weights have the scale and the storage that a bundle's have, and run."""

from __future__ import annotations

import torch

from benchmarks.random_model import random_model
from loka_serve.models.config import PRESETS

TINY = PRESETS["tiny"]


def test_scales_and_dtypes() -> None:
    model = random_model(TINY, "cpu", seed=1)
    sites = {f"{name}.weight" for name in model.sites()}
    for name, parameter in model.named_parameters():
        values = parameter.float()
        if name in sites:
            assert parameter.dtype == torch.bfloat16
            assert 0.9 < float(values.std() * parameter.shape[-1] ** 0.5) < 1.1, name
        elif parameter.ndim == 2:
            assert parameter.dtype == torch.bfloat16
            assert parameter.shape[0] < 8 or 0.9 < float(values.std()) < 1.1, name
        elif name not in ("bos", "context.static"):
            assert parameter.dtype == torch.float32
            assert values.unique().tolist() == [0.0 if name.endswith("selection_bias") else 1.0], name


def test_runs_and_repeats() -> None:
    history = torch.randint(0, 256, (2, 5, 3))
    logits = []
    for _ in range(2):
        model = random_model(TINY, "cpu", seed=7)
        context = model.prepare_context(history, torch.tensor([5, 3]), torch.zeros(2, 0, dtype=torch.int64))
        logits.append(model.teacher_forced(context, history[:, :1], torch.tensor([[5], [3]]))[0])
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])
