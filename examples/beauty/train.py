"""Trains the Beauty model: a small OneRec-V2 with sparse mixtures of experts.

python -m examples.beauty.train --data DIR --out OUT [--device cuda] [--seconds S | --epochs N | --max-steps N]

The exponential moving average of the weights is measured on the validation items as training goes on; the best one, by
Recall@10 with the user's history excluded, goes to OUT/checkpoint in bfloat16, all measurements to OUT/record.json.
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

from examples.beauty.batches import PrefixSource
from examples.beauty.objective import Options, model_config
from examples.beauty.scoring import validate
from examples.beauty.sequences import BeautyError, Sequences, load_sequences
from examples.groceries.train import Clock, write_checkpoint
from examples.groceries.trainer import Trainer
from loka_serve.command_line import CommandParser, duration, positive, run_command_line, usable_device

MEASURE_FROM, MEASURE_EVERY = 0.15, 0.07  # parts of a run; such small data is soon known by heart
RECORD_FILE = "record.json"


def score_of(validation: dict[str, dict[str, float]]) -> float:
    """What the best weights are chosen by."""
    return validation["history_excluded"]["recall@10"]


class EpochClock:
    """As `Clock`, for a run of a number of epochs."""

    def __init__(self, epochs: int, measure_every: int) -> None:
        self.epochs, self.measure_every, self.done = epochs, measure_every, 0.0

    def progress(self) -> float:
        """0 at the start, 1 after the last epoch."""
        return self.done / self.epochs

    def measurement_due(self) -> bool:
        return self.done % self.measure_every == 0 or self.done >= self.epochs

    def measured_for(self, seconds: float) -> None:
        """Epochs take what they take."""


def train(
    options: Options,
    sequences: Sequences,
    out: Path,
    device: torch.device,
    seconds: float | None = None,
    max_steps: int | None = None,
    validate_part: int = 1,
    measure_every: int = 1,
    log: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Trains for `seconds`, or for the options' epochs; returns the records of all epochs."""
    clock = (
        EpochClock(options.epochs, measure_every)
        if seconds is None
        else Clock(seconds, measure_from=MEASURE_FROM, measure_every=MEASURE_EVERY)
    )
    if (out / RECORD_FILE).exists():
        raise BeautyError(f"{out}: holds a run already; use another --out")
    out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options, model_config(options, sequences.codebook_sizes), sequences.semantic_ids, device)
    source = PrefixSource(
        sequences,
        context=options.max_context,
        rows=options.rows,
        history_dropout=options.history_dropout,
        device=device,
        seed=options.seed,
    )
    users = np.arange(0, sequences.users, validate_part)
    torch.manual_seed(options.seed)
    records: list[dict[str, Any]] = []
    begun, best, finished = time.monotonic(), -1.0, False
    while not finished:
        epoch, losses = len(records), []
        for fraction, batch in source.epoch(epoch):
            if isinstance(clock, EpochClock):
                clock.done = epoch + fraction
            losses.append(trainer.step(batch, clock.progress()))
            if clock.progress() >= 1.0 or trainer.steps == max_steps:
                break
        if isinstance(clock, EpochClock):
            clock.done = epoch + 1
        # Reading the loss waits for the device, so that the clock tells the truth.
        record: dict[str, Any] = {"epoch": epoch + 1, "steps": trainer.steps, "loss": float(torch.stack(losses).mean())}
        record["seconds"] = time.monotonic() - begun
        finished = clock.progress() >= 1.0 or trainer.steps == max_steps
        if finished or clock.measurement_due():
            started = time.monotonic()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                record["validation"] = validate(
                    trainer.average, sequences, trainer.legal, beam=options.beam, device=device, users=users
                )
            if score_of(record["validation"]) > best:
                best = score_of(record["validation"])
                training = {
                    "sequences_version": sequences.version,
                    "options": dataclasses.asdict(options),
                    "seconds": seconds,
                    "best": record,
                }
                write_checkpoint(trainer, out / "checkpoint", training)
            clock.measured_for(time.monotonic() - started)
        records.append(record)
        (out / RECORD_FILE).write_text(json.dumps(records, indent=1) + "\n")
        log(json.dumps(record))
    return records


COUNTS = dict.fromkeys(("rows", "epochs", "beam", "max_context", "layers", "heads", "experts"), positive)
"""Options that count something; a model's other sizes are checked by its configuration."""


def add_options(parser: CommandParser, defaults: Options) -> None:
    """A command line option for every field of the options."""
    for field in dataclasses.fields(Options):
        kind = COUNTS.get(field.name, type(field.default))
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=getattr(defaults, field.name))


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="record.json and the best checkpoint go here")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=duration, help="train as long as this, validation included; not by epochs")
    parser.add_argument("--max-steps", type=positive, help="stop early, to try things out")
    parser.add_argument("--validate-part", type=positive, default=1, help="measure on every n-th user only")
    parser.add_argument("--measure-every", type=positive, default=1, help="epochs between measurements")
    add_options(parser, Options())
    arguments = vars(parser.parse_args())
    options = Options(**{field.name: arguments[field.name] for field in dataclasses.fields(Options)})
    keywords = ("seconds", "max_steps", "validate_part", "measure_every")
    train(
        options,
        load_sequences(arguments["data"]),
        arguments["out"],
        torch.device(arguments["device"]),
        **{name: arguments[name] for name in keywords},
    )


if __name__ == "__main__":
    run_command_line(main)
