"""Trains the groceries model: a small OneRec-V2 with sparse mixtures of experts.

python -m examples.groceries.train --data DIR --out DIR [--device cuda] [--max-steps N]

Every epoch ends with a state file, and the same command continues from it. The exponential moving average of the
weights is what is measured on the validation baskets; the best epoch's average goes, in bfloat16, to OUT/checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from examples.groceries.batches import Batch, BatchSource
from examples.groceries.objective import Options, build_model, loss_of
from examples.groceries.prepare import Sequences, load_sequences
from examples.groceries.purchases import GroceriesError
from examples.groceries.scoring import LegalCodes, evaluate_model
from loka_serve.models.checkpoint import load_checkpoint, save_checkpoint
from loka_serve.models.layers import SparseMoE
from loka_serve.models.onerec_v2 import OneRecV2

TRAINING_FILE = "training.json"
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
    """Model, optimizer and moving average, and the step that advances them."""

    def __init__(self, options: Options, sequences: Sequences, device: torch.device) -> None:
        self.options, self.device = options, device
        self.model = build_model(options, sequences, device)
        self.average = build_model(options, sequences, device).eval()
        self.legal = LegalCodes(sequences.semantic_ids, sequences.codebook_sizes, device)
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
        """Starts from the weights of an earlier checkpoint of the same architecture."""
        weights = load_checkpoint(checkpoint, self.device, torch.float32)
        if weights.config != self.model.config:
            raise GroceriesError(f"{checkpoint}: its config.json differs from the options and the prepared data")
        for module in (self.model, self.average):
            module.load_state_dict(weights.state_dict())

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
            context = self.model.prepare_context(batch.history, batch.lengths, batch.features)
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
        """Continues from what `save` wrote; returns the number of finished epochs."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        if json.loads(metadata["options"]) != dataclasses.asdict(self.options):
            raise GroceriesError(f"{path} was written with other options: {metadata['options']}; use another --out")
        tensors = load_file(path, device=str(self.device))
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
        self.steps = int(metadata["steps"])
        return int(metadata["epoch"])


def selection_score(metrics: dict[str, dict[str, float]]) -> float:
    """What the best epoch is chosen by: the sum of the validation NDCG@10 of all three measures."""
    return sum(values["ndcg@10"] for values in metrics.values())


def write_checkpoint(trainer: Trainer, directory: Path, training: dict[str, Any]) -> None:
    """The average as a bfloat16 checkpoint, with training.json beside it."""
    model = OneRecV2(trainer.average.config)
    model.load_state_dict(trainer.average.state_dict())
    save_checkpoint(model.to(torch.bfloat16), directory)
    (directory / TRAINING_FILE).write_text(json.dumps(training, indent=2) + "\n")


def train(
    options: Options,
    sequences: Sequences,
    out: Path,
    device: torch.device,
    max_steps: int | None = None,
    stop_after: int | None = None,
    validate_from: int = 1,
    validate_part: int = 1,
    initial: Path | None = None,
    log: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Trains to the end, or through epoch `stop_after`; returns the validation record of every epoch."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options, sequences, device)
    if initial is not None:
        trainer.start_from(initial)
    state, record_path = out / "state.safetensors", out / "record.json"
    first = trainer.load_state(state) if state.exists() else 0
    records: list[dict[str, Any]] = json.loads(record_path.read_text())[:first] if first else []
    source = BatchSource(
        sequences,
        held_out=options.held_out - 1,
        chunk=options.chunk,
        context=options.max_context,
        rows=options.rows,
        mode_shares=(
            1.0 - options.product_number_share - options.any_order_share,
            options.product_number_share,
            options.any_order_share,
        ),
        feature_dropout=options.feature_dropout,
        household_power=options.household_power,
        basket_power=options.basket_power,
        device=device,
        seed=options.seed,
        epoch_share=options.epoch_share,
    )
    validated = np.arange(0, len(sequences.household_ids), validate_part)
    for epoch in range(first, min(options.epochs, stop_after or options.epochs)):
        torch.manual_seed(options.seed * 1000 + epoch)  # dropout, so that a resumed epoch repeats it
        started, losses = time.monotonic(), []
        for fraction, batch in source.epoch(epoch):
            losses.append(trainer.step(batch, (epoch + fraction) / options.epochs))
            if max_steps is not None and trainer.steps >= max_steps:
                break
        trained = time.monotonic()
        record: dict[str, Any] = {"epoch": epoch + 1, "steps": trainer.steps, "loss": float(torch.stack(losses).mean())}
        record["train_seconds"] = trained - started
        if options.held_out >= 2 and epoch + 1 >= validate_from and max_steps is None:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                record["validation"] = evaluate_model(
                    trainer.average,
                    sequences,
                    trainer.legal,
                    held_out=1,
                    beam=options.beam,
                    device=device,
                    households=validated,
                )
            record["score"] = selection_score(record["validation"])
        record["seconds"] = time.monotonic() - started
        earlier = [entry.get("score", -1.0) for entry in records]
        records.append(record)
        if record.get("score", 0.0) >= max(earlier, default=-1.0) or options.held_out < 2:
            training = {"sequences_version": sequences.version, "options": dataclasses.asdict(options), "best": record}
            if initial is not None:
                training["initial"] = json.loads((initial / TRAINING_FILE).read_text())
            write_checkpoint(trainer, out / "checkpoint", training)
        record_path.write_text(json.dumps(records, indent=1) + "\n")
        trainer.save(state, epoch + 1)
        log(json.dumps(record))
        if max_steps is not None and trainer.steps >= max_steps:
            break
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="state, record.json and the best checkpoint go here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-steps", type=int, help="stop early and skip validation, to try things out")
    parser.add_argument("--stop-after", type=int, help="stop after this epoch of the schedule; a later run continues")
    parser.add_argument("--validate-from", type=int, default=1, help="first epoch that is measured")
    parser.add_argument("--initial", type=Path, help="a checkpoint to start from instead of random weights")
    parser.add_argument("--validate-part", type=int, default=1, help="measure on every n-th household only")
    for field in dataclasses.fields(Options):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = vars(parser.parse_args())
    options = Options(**{field.name: arguments[field.name] for field in dataclasses.fields(Options)})
    keywords = ("max_steps", "stop_after", "validate_from", "validate_part", "initial")
    train(
        options,
        load_sequences(arguments["data"]),
        arguments["out"],
        torch.device(arguments["device"]),
        **{name: arguments[name] for name in keywords},
    )


if __name__ == "__main__":
    try:
        main()
    except GroceriesError as error:
        raise SystemExit(f"error: {error}") from None
