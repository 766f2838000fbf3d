"""Measures the trained model on the test items, as the server would answer, beside the baselines.

python -m examples.beauty.evaluate --data DIR [--checkpoint DIR | --bundle DIR] [--device cuda] [--out FILE]

Every user's last item among all items, by the constrained beam search of the reference engine: once as it is, once with
the items of the user's history excluded inside the search (`exclude_history`).
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.beauty import baselines
from examples.beauty.metrics import ranking_metrics, ranks_in
from examples.beauty.sequences import TEST, VALIDATION, BeautyError, Sequences, load_sequences
from examples.groceries.evaluate import checkpoint_digest, load_bf16
from examples.groceries.records import TRAINING_FILE, read_object, value_at
from loka_serve.bundle import Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.readers import read_catalog
from loka_serve.command_line import CommandParser, output_file, positive, run_command_line, usable_device
from loka_serve.engines.base import Engine, EngineLimits, EngineRequest
from loka_serve.engines.reference import ReferenceEngine
from loka_serve.evaluation import bootstrap_interval
from loka_serve.gate import recommend_items

CHECKPOINT = Path(__file__).parent / "checkpoint"
RESULTS = Path(__file__).parent / "results.json"
TOP = 10
BATCH = {"cpu": 64}
# Recall@10 of the papers, on this split, ranked among all items.
PUBLISHED = {"TIGER (arXiv 2305.05065)": 0.0648, "SASRec (as reported there)": 0.0605}


def check_version(checkpoint: Path, sequences: Sequences) -> dict[str, Any]:
    """The checkpoint's training.json; raises BeautyError if it was trained with other semantic IDs."""
    path = checkpoint / TRAINING_FILE
    training = read_object(path)
    version = value_at(path, training, "sequences_version", str, "a text")
    if version != sequences.version:
        raise BeautyError(
            f"{path}: trained on semantic IDs of version {version}, but the prepared data has {sequences.version}: "
            "run prepare.py again without --recompute, or train again"
        )
    return training


def load_engine(data: Path, checkpoint: Path, bundle: Path | None, device: str, beam: int) -> ReferenceEngine:
    """The reference engine with the bundle, or with the checkpoint as a BF16 bundle of it would compute."""
    if bundle is not None:
        loaded = Bundle.load(bundle)
        model, catalog = loaded.load_model(torch.device(device)), loaded.catalog
    else:
        model = load_bf16(checkpoint, torch.device(device))
        catalog = read_catalog(data / "catalog.jsonl", model.config.codebook_sizes)
    batch = BATCH.get(torch.device(device).type, 512)
    limits = EngineLimits(batch, beam, model.config.max_context, model.config.levels)
    return ReferenceEngine(model, catalog, limits, device)


def rank_targets(
    engine: Engine,
    catalog: Catalog,
    sequences: Sequences,
    users: NDArray[np.int64],
    *,
    held_out: int,
    exclude_history: bool,
) -> NDArray[np.int64]:
    """Rank from 0 of each user's held-out item among the ten best, MISSED where it is not there; int64 [users]."""
    index_of = catalog.indices_of([str(item) for item in sequences.item_ids])
    ranks = []
    for first in range(0, len(users), engine.limits.batch):
        some = users[first : first + engine.limits.batch]
        requests = []
        for user in some:
            indices = index_of[sequences.history(int(user), held_out)]
            codes = catalog.semantic_ids(indices[-engine.limits.context :]).astype(np.int32)
            allowed = catalog.filter(exclude=indices, predicates={}) if exclude_history else None
            requests.append(EngineRequest(codes, np.zeros(0, np.int32), engine.limits.beam, allowed))
        items = np.full((len(some), TOP), -1, np.int64)
        for place, ranking in enumerate(recommend_items(engine, catalog, requests, TOP)):
            items[place, : len(ranking.items)] = ranking.items
        ranks.append(ranks_in(items, index_of[sequences.targets(held_out)[some]]))
    return np.concatenate(ranks)


def measure(engine: ReferenceEngine, sequences: Sequences, users: NDArray[np.int64], held_out: int) -> dict[str, Any]:
    """{"plain", "history_excluded"}: ranking metrics, and the 95 % interval of Recall@10 over users."""
    results: dict[str, Any] = {}
    for mode in ("plain", "history_excluded"):
        ranks = rank_targets(
            engine, engine.catalog, sequences, users, held_out=held_out, exclude_history=mode == "history_excluded"
        )
        interval = bootstrap_interval((ranks < TOP).astype(np.float64))
        results[mode] = {**ranking_metrics(ranks), "recall@10_interval": list(interval)}
    return results


def evaluate(data: Path, checkpoint: Path, bundle: Path | None, device: str, beam: int, every: int) -> dict[str, Any]:
    """Everything that results.json holds."""
    sequences = load_sequences(data)
    training = check_version(checkpoint, sequences)
    engine = load_engine(data, checkpoint, bundle, device, beam)
    users = np.arange(0, sequences.users, every)
    return {
        "ours": measure(engine, sequences, users, TEST),
        "ours_on_validation": measure(engine, sequences, users, VALIDATION),
        "baselines": baselines.evaluate(sequences, TEST),
        "baselines_on_validation": baselines.evaluate(sequences, VALIDATION),
        "published_recall@10": PUBLISHED,
        "environment": {
            "users": len(users),
            "beam_width": beam,
            "weights": "bundle" if bundle is not None else "checkpoint in bf16",
            "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "command": f"python -m examples.beauty.evaluate --data DATA --device {device} --beam {beam}"
            + (" --bundle BUNDLE" if bundle is not None else "")
            + (f" --every {every}" if every > 1 else ""),
            "checkpoint": checkpoint_digest(checkpoint),
            "parameters": sum(value.numel() for value in engine.model.parameters()) if bundle is None else None,
            "trained": training["best"],
        },
    }


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--bundle", type=Path, help="measure this bundle of the checkpoint instead of BF16")
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--beam", type=positive, default=64)
    parser.add_argument("--every", type=positive, default=1, help="measure on every n-th user only")
    parser.add_argument("--out", type=output_file, default=RESULTS)
    arguments = parser.parse_args()
    results = evaluate(
        arguments.data,
        arguments.checkpoint,
        arguments.bundle,
        arguments.device,
        arguments.beam,
        arguments.every,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    run_command_line(main)
