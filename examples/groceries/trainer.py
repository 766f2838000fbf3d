"""Model, optimizer and moving average of a training run, and the step that advances them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples.groceries.batches import Batch
from examples.groceries.contexts import shared_context
from examples.groceries.objective import TrainerOptions, fresh_model, loss_of
from examples.groceries.purchases import GroceriesError
from examples.groceries.scoring import LegalCodes
from loka_serve.models.checkpoint import load_checkpoint
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.layers import SparseMoE
from loka_serve.models.onerec_v2 import OneRecV2

Route = Callable[[Tensor], tuple[Tensor, Tensor]]


def watch_load(model: OneRecV2) -> list[tuple[SparseMoE, Tensor]]:
    """Counts the tokens of every expert from now on: (block, float32 [experts]) pairs, to be read and zeroed."""
    watched = []
    for module in model.modules():
        if isinstance(module, SparseMoE):
            load = torch.zeros(module.experts, device=module.selection_bias.device)
            module.route = _counting(module.route, load)  # type: ignore[method-assign, assignment]
            watched.append((module, load))
    return watched


def _counting(route: Route, load: Tensor) -> Route:
    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        selected, weights = route(x)
        load.add_((selected[..., None] == torch.arange(len(load), device=load.device)).sum((0, 1)))
        return selected, weights

    return counted


class Trainer:
    """Model, optimizer and moving average, and the step that advances them.

    semantic_ids int32 [items, levels] say which codes the loss counts as legal.
    """

    def __init__(
        self, options: TrainerOptions, config: OneRecV2Config, semantic_ids: NDArray[np.int32], device: torch.device
    ) -> None:
        self.options, self.device = options, device
        self.model = fresh_model(config, options, device)
        self.average = fresh_model(config, options, device).eval()
        self.legal = LegalCodes(semantic_ids, config.codebook_sizes, device)
        self.load = watch_load(self.model)
        trained = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        tables = ("embeddings", "bos", "static", "norm")
        groups = [
            {"params": [value for name, value in trained.items() if not any(table in name for table in tables)]},
            {"params": [value for name, value in trained.items() if any(table in name for table in tables)]},
        ]
        groups[0]["weight_decay"], groups[1]["weight_decay"] = options.weight_decay, 0.0  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=(0.9, 0.98), fused=device.type == "cuda"
        )
        self.steps = 0

    def start_from(self, checkpoint: Path) -> None:
        """Starts from an earlier checkpoint of the same architecture; features that it lacks start without effect."""
        weights = load_checkpoint(checkpoint, self.device, torch.float32)
        earlier, config = weights.config, self.model.config
        known = config.features[: len(earlier.features)]
        if dataclasses.replace(config, features=known) != earlier:
            raise GroceriesError(f"{checkpoint}: its config.json differs from the options and the prepared data")
        for module in (self.model, self.average):
            module.load_state_dict(weights.state_dict(), strict=False)
            for table in module.context.feature_embeddings[len(known) :]:
                nn.init.zeros_(table.get_parameter("weight"))

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then a cosine down to a fiftieth, over the whole run (progress 0 to 1)."""
        peak, warmup = self.options.learning_rate, self.options.warmup
        if progress < warmup:
            return peak * (progress + 1e-4) / warmup
        return peak * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * (progress - warmup) / (1.0 - warmup))))

    def step(self, batch: Batch, progress: float) -> Tensor:
        """One optimizer step; the batch's loss, a scalar still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            context = shared_context(self.model, batch.history, batch.lengths, batch.features, batch.basket_items)
            logits = self.model.teacher_forced(context, batch.targets, batch.cutoffs)
        loss = loss_of(logits, batch, self.legal, self.options.legality_weight * (0.1 + 0.9 * progress))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([value for value in self.model.parameters() if value.requires_grad], 1.0)
        self.optimizer.step()
        self.steps += 1
        self._balance()
        self._follow()
        return loss.detach()

    @torch.no_grad()
    def _balance(self) -> None:
        for block, load in self.load:
            block.selection_bias.add_(torch.sign(load.mean() - load), alpha=self.options.balance_rate)
            load.zero_()

    @torch.no_grad()
    def _follow(self) -> None:
        # Early averages forget fast, so that the random start does not linger.
        decay = min(self.options.average_decay, self.steps / (self.steps + 10.0))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1.0 - decay)

    def save(self, path: Path, epoch: int) -> None:
        """Writes model, average and optimizer as one safetensors file, in place of the earlier one at once."""
        tensors = {f"model.{name}": value.detach() for name, value in self.model.named_parameters()}
        tensors |= {f"average.{name}": value.detach() for name, value in self.average.named_parameters()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
        tensors = {name: value.contiguous().cpu() for name, value in tensors.items()}
        options = json.dumps(dataclasses.asdict(self.options))
        metadata = {"epoch": str(epoch), "steps": str(self.steps), "options": options}
        save_file(tensors, path.with_suffix(".part"), metadata=metadata)
        path.with_suffix(".part").replace(path)

    def load_state(self, path: Path) -> int:
        """Continues from what `save` wrote; returns the number of finished epochs.

        Raises:
            GroceriesError: the file is damaged, or of a run with other options.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
            if json.loads(metadata["options"]) != dataclasses.asdict(self.options):
                raise GroceriesError(f"{path} was written with other options: {metadata['options']}; use another --out")
            self._take(load_file(path, device=str(self.device)))
            self.steps = int(metadata["steps"])
            return int(metadata["epoch"])
        except torch.OutOfMemoryError:
            raise
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise GroceriesError(
                f"{path}: not what an interrupted run leaves ({type(error).__name__}: {error}): use another --out"
            ) from error

    def _take(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for prefix, module in (("model", self.model), ("average", self.average)):
                for name, parameter in module.named_parameters():
                    parameter.copy_(tensors[f"{prefix}.{name}"])
        packed = self.optimizer.state_dict()
        packed["state"] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                packed["state"].setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(packed)
