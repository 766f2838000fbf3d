"""Trains several variants side by side on one device and keeps the one that validates best.

python -m examples.beauty.search --data DIR --out OUT --seconds 150 [--variants NAME ...]

Each variant is a process of `examples.beauty.train` with its own folder OUT/NAME (log.txt, record.json, checkpoint);
a model of this size leaves a GPU idle most of the time. The best variant's checkpoint is copied to OUT/checkpoint,
and OUT/search.json says what every variant reached.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from examples.beauty.sequences import BeautyError, load_sequences
from examples.beauty.train import RECORD_FILE, score_of
from examples.groceries.records import read_list
from loka_serve.command_line import CommandParser, duration, run_command_line, usable_device

# What differs from the defaults of `Options`. Those in WIDE are for comparison: their checkpoints are too large to be
# committed.
VARIANTS: dict[str, dict[str, str]] = {
    "base": {},
    "dropout": {"dropout": "0.4", "context-dropout": "0.4"},
    "history_dropout": {"history-dropout": "0.3", "dropout": "0.3", "context-dropout": "0.3"},
    "small_batches": {"rows": "256", "learning-rate": "2e-3", "dropout": "0.3", "context-dropout": "0.3"},
    "experts": {"experts": "8", "dropout": "0.3", "context-dropout": "0.3"},
}
WIDE = ("experts",)


def command_of(name: str, data: Path, out: Path, device: str, more: list[str]) -> list[str]:
    """The training command of a variant."""
    options = [part for option, value in VARIANTS[name].items() for part in (f"--{option}", value)]
    base = [sys.executable, "-m", "examples.beauty.train", "--data", str(data), "--out", str(out / name)]
    return [*base, "--device", device, *options, *more]


def summary_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The best measurement of a run, and how far the run came."""
    measured = [record for record in records if "validation" in record]
    best = max(measured, key=lambda record: score_of(record["validation"]))
    return {"epochs": records[-1]["epoch"], "steps": records[-1]["steps"], "best": best}


def search(names: list[str], data: Path, out: Path, device: str, more: list[str]) -> dict[str, Any]:
    """Runs the variants at once; what each reached, and which is the best of those that may be committed.

    Raises:
        BeautyError: no variant came to its end; names their logs.
    """
    out.mkdir(parents=True, exist_ok=True)
    load_sequences(data)  # so that a wrong folder is told once
    running = {}
    for name in names:
        with (out / f"{name}.log").open("w") as log:
            command = command_of(name, data, out, device, more)
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    ended = [name for name, process in running.items() if process.wait() == 0]
    if not ended:
        raise BeautyError(f"{out}: no variant came to its end: see {', '.join(f'{name}.log' for name in names)}")
    reached = {name: summary_of(read_list(out / name / RECORD_FILE)) for name in ended}
    candidates = [name for name in ended if name not in WIDE] or ended
    chosen = max(candidates, key=lambda name: score_of(reached[name]["best"]["validation"]))
    shutil.copytree(out / chosen / "checkpoint", out / "checkpoint", dirs_exist_ok=True)
    summary = {
        "chosen": chosen,
        "failed": [name for name in names if name not in ended],
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else device,
        "torch": torch.__version__,
        "options": more,
        "variants": {name: {"options": VARIANTS[name], **reached[name]} for name in ended},
    }
    (out / "search.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=duration, default=150.0, help="of each variant; they run at the same time")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), metavar="NAME")
    arguments = parser.parse_args()
    more = ["--seconds", str(arguments.seconds)]
    summary = search(arguments.variants, arguments.data, arguments.out, arguments.device, more)
    for name, reached in summary["variants"].items():
        print(name, json.dumps(reached["best"]))
    print(f"chosen: {summary['chosen']}")


if __name__ == "__main__":
    run_command_line(main)
