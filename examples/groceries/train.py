"""Trains the groceries model: a small OneRec-V2 with sparse mixtures of experts.

python -m examples.groceries.train --data DIR --out DIR [--device cuda] [--max-steps N | --seconds S]

Every epoch ends with a state file, and the same command continues from it. The exponential moving average of the
weights is what is measured on the validation baskets; the best average goes, in bfloat16, to OUT/checkpoint.
With --seconds the schedule follows the clock instead of the epochs: as many as fit, and no state file.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.groceries.batches import BatchSource
from examples.groceries.objective import Options, model_config
from examples.groceries.prepare import Sequences, load_sequences
from examples.groceries.purchases import GroceriesError
from examples.groceries.records import TRAINING_FILE, read_list, read_object
from examples.groceries.scoring import evaluate_model
from examples.groceries.selection import selection_score
from examples.groceries.trainer import Trainer
from loka_serve.command_line import CommandParser, duration, positive, run_command_line, usable_device, zero_or_one
from loka_serve.models.checkpoint import save_checkpoint
from loka_serve.models.onerec_v2 import OneRecV2

UNLIMITED = 1_000_000
MEASURE_FROM, MEASURE_EVERY = 0.45, 0.18  # parts of a run of --seconds


class Clock:
    """Progress of a run of fixed duration, and when it is measured. Time for the last measurement is set aside."""

    def __init__(
        self,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
        measure_from: float = MEASURE_FROM,
        measure_every: float = MEASURE_EVERY,
    ) -> None:
        self.seconds, self.now, self.measure_every = seconds, now, measure_every
        self.begun, self.reserve, self.next_measurement = now(), 0.03 * seconds, measure_from

    def progress(self) -> float:
        """0 at the start, 1 when only the time for the last measurement is left."""
        return min(1.0, (self.now() - self.begun) / max(self.seconds - self.reserve, 1e-9))

    def measurement_due(self) -> bool:
        """Whether to measure now; counts on it being done."""
        progress = self.progress()
        if progress < self.next_measurement:
            return False
        self.next_measurement = min(progress + self.measure_every, 1.0)
        return True

    def measured_for(self, seconds: float) -> None:
        """Learns from a measurement how much time one takes, with a quarter to spare."""
        self.reserve = 1.25 * seconds


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
    seconds: float | None = None,
    log: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Trains to the end, through epoch `stop_after` or for `seconds`; returns the validation record of every epoch."""
    clock = Clock(seconds) if seconds is not None else None
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options, model_config(options, sequences), sequences.semantic_ids, device)
    initial_training = None
    if initial is not None:
        initial_training = read_object(initial / TRAINING_FILE)
        trainer.start_from(initial)
    state, record_path = out / "state.safetensors", out / "record.json"
    if clock is not None and record_path.exists():
        raise GroceriesError(f"{out}: a run of --seconds is not continued; use another --out")
    first = trainer.load_state(state) if state.exists() else 0
    records: list[dict[str, Any]] = read_list(record_path)[:first] if first else []
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
        count_dropout=options.count_dropout if options.open_basket_items else None,
    )
    validated = np.arange(0, len(sequences.household_ids), validate_part)
    epochs = UNLIMITED if clock is not None else min(options.epochs, stop_after or options.epochs)
    for epoch in range(first, epochs):
        torch.manual_seed(options.seed * 1000 + epoch)  # dropout, so that a resumed epoch repeats it
        started, losses = time.monotonic(), []
        for fraction, batch in source.epoch(epoch):
            progress = (epoch + fraction) / options.epochs if clock is None else clock.progress()
            losses.append(trainer.step(batch, progress))
            if (max_steps is not None and trainer.steps >= max_steps) or progress >= 1.0:
                break
        record: dict[str, Any] = {"epoch": epoch + 1, "steps": trainer.steps, "loss": float(torch.stack(losses).mean())}
        trained = time.monotonic()
        record["train_seconds"] = trained - started
        due = clock.measurement_due() if clock is not None else epoch + 1 >= validate_from
        if options.held_out >= 2 and due and max_steps is None:
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
            if initial_training is not None:
                training["initial"] = initial_training
            if clock is not None:
                training["clock"] = {"seconds": clock.seconds, "progress": clock.progress()}
            write_checkpoint(trainer, out / "checkpoint", training)
        record_path.write_text(json.dumps(records, indent=1) + "\n")
        log(json.dumps(record))
        if clock is None:
            trainer.save(state, epoch + 1)
        elif progress >= 1.0:
            break
        elif "score" in record:
            clock.measured_for(time.monotonic() - trained)
        if max_steps is not None and trainer.steps >= max_steps:
            break
    return records


COUNTS = dict.fromkeys(("rows", "chunk", "epochs", "beam", "max_context", "held_out", "layers", "heads"), positive) | {
    "open_basket_items": zero_or_one
}
"""Options that count something; a model's other sizes are checked by its configuration."""


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="state, record.json and the best checkpoint go here")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-steps", type=positive, help="stop early and skip validation, to try things out")
    parser.add_argument("--seconds", type=duration, help="train as long as this, start and validation included")
    parser.add_argument("--stop-after", type=positive, help="stop after this epoch; a later run continues")
    parser.add_argument("--validate-from", type=positive, default=1, help="first epoch that is measured")
    parser.add_argument("--initial", type=Path, help="a checkpoint to start from instead of random weights")
    parser.add_argument("--validate-part", type=positive, default=1, help="measure on every n-th household only")
    for field in dataclasses.fields(Options):
        kind = COUNTS.get(field.name, type(field.default))
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = vars(parser.parse_args())
    options = Options(**{field.name: arguments[field.name] for field in dataclasses.fields(Options)})
    keywords = ("max_steps", "stop_after", "validate_from", "validate_part", "initial", "seconds")
    train(
        options,
        load_sequences(arguments["data"]),
        arguments["out"],
        torch.device(arguments["device"]),
        **{name: arguments[name] for name in keywords},
    )


if __name__ == "__main__":
    run_command_line(main)
