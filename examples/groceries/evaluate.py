"""Measures the trained model against the baselines, and an FP8 bundle of it against BF16; writes results.json.

python -m examples.groceries.evaluate --data DIR [--checkpoint DIR] [--bundle DIR] [--device cuda] [--out FILE]

--bundle is what `python -m loka_serve.build --recipe auto` made of the checkpoint; without it the file's earlier
FP8 figures are kept if they belong to the same checkpoint. The model computes as a BF16 bundle of it would.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from examples.groceries import baselines
from examples.groceries.batches import ANY_ORDER, NEXT_BASKET, PRODUCT_NUMBER_ORDER
from examples.groceries.contexts import counts_basket_items
from examples.groceries.metrics import next_item_metrics
from examples.groceries.prepare import SEED, Sequences, load_sequences
from examples.groceries.purchases import GroceriesError
from examples.groceries.records import check_version, read_earlier
from examples.groceries.scoring import LegalCodes, Recommendations, measure_baskets, recommend
from loka_serve.build import run_as_bf16
from loka_serve.bundle import Bundle
from loka_serve.command_line import CommandParser, not_negative, output_file, positive, run_command_line, usable_device
from loka_serve.evaluation import top_k_overlap
from loka_serve.models.checkpoint import load_checkpoint, load_config
from loka_serve.models.onerec_v2 import OneRecV2

CHECKPOINT = Path(__file__).parent / "checkpoint"
RESULTS = Path(__file__).parent / "results.json"
OVERLAP_TOP = 50
MAIN_BASELINES = ("popularity", "markov", "own_repeat", "blend")


def load_bf16(checkpoint: Path, device: torch.device) -> OneRecV2:
    """The checkpoint, computing as a BF16 bundle would."""
    model = load_checkpoint(checkpoint, device)
    run_as_bf16(model, cache_weight=True)
    return model


@dataclass(frozen=True)
class Source:
    """Where a worker finds what it scores: the prepared data, and a checkpoint or a bundle."""

    data: Path
    model: Path
    is_bundle: bool
    device: str


@functools.lru_cache(maxsize=1)
def load_source(source: Source) -> tuple[Sequences, LegalCodes, OneRecV2]:
    """Loaded once a process."""
    sequences, device = load_sequences(source.data), torch.device(source.device)
    legal = LegalCodes(sequences.semantic_ids, sequences.codebook_sizes, device)
    if source.is_bundle:
        return sequences, legal, Bundle.load(source.model).load_model(device)
    return sequences, legal, load_bf16(source.model, device)


def recommend_part(source: Source, mode: int, beam: int, counted: bool, part: int, parts: int) -> Recommendations:
    """Recommendations for every `parts`-th household from `part` on; `counted` as for `scoring.recommend`."""
    if source.device == "cpu" and parts > 1:
        torch.set_num_threads(1)
    sequences, legal, model = load_source(source)
    numbers = np.arange(part, len(sequences.household_ids), parts)
    return recommend(
        model,
        sequences,
        legal,
        held_out=0,
        mode=mode,
        beam=beam,
        device=torch.device(source.device),
        households=numbers,
        counted=counted,
    )


def recommend_all(
    source: Source, mode: int, beam: int, workers: int, every: int = 1, counted: bool = True
) -> Recommendations:
    """Recommendations for every `every`-th household, by as many processes as there are workers."""
    if workers == 1:
        return recommend_part(source, mode, beam, counted, 0, every)
    parts = 8 * workers * every  # households differ in size, so that small parts even out
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(recommend_part, source, mode, beam, counted, part, parts) for part in range(0, parts, every)
        ]
        results = [task.result() for task in tasks]
    return Recommendations(
        items=np.concatenate([result.items for result in results]),
        targets=np.concatenate([result.targets for result in results]),
        households=np.concatenate([result.households for result in results]),
    )


def of_households(recommendations: Recommendations, households: NDArray[np.int64]) -> Recommendations:
    """The positions of the given households, in their order there."""
    kept = np.concatenate(
        [np.flatnonzero(recommendations.households == number) for number in dict.fromkeys(households)]
    )
    return Recommendations(*(getattr(recommendations, field)[kept] for field in ("items", "targets", "households")))


def compare(fp8: Recommendations, bf16: Recommendations) -> dict[str, float]:
    """How far the quantized model's recommendations are from the BF16 model's, position by position."""
    bf16 = of_households(bf16, fp8.households)
    before, after = next_item_metrics(bf16.ranks()), next_item_metrics(fp8.ranks())
    return {
        "hr@10_relative_change": after["hr@10"] / before["hr@10"] - 1.0,
        "ndcg@10_relative_change": after["ndcg@10"] / before["ndcg@10"] - 1.0,
        "top50_overlap": top_k_overlap(fp8.items.tolist(), bf16.items.tolist(), OVERLAP_TOP),
        "positions": len(bf16.targets),
    }


def load_bundle(path: Path, checkpoint: Path) -> Bundle:
    """The bundle; raises GroceriesError if it cannot be one of the checkpoint."""
    bundle = Bundle.load(path)
    if bundle.config != load_config(checkpoint):
        raise GroceriesError(f"{path}: its configuration differs from that of {checkpoint}: build it from there")
    return bundle


def describe_bundle(bundle: Bundle) -> dict[str, Any]:
    """Bytes and recipes of a bundle's sites."""
    recipes = [bundle.plan[site] for site in bundle.plan.recipes]
    return {
        "weight_bytes_ratio": quantized_bytes_ratio(bundle),
        "sites_by_recipe": {recipe: recipes.count(recipe) for recipe in sorted(set(recipes))},
    }


def quantized_bytes_ratio(bundle: Bundle) -> float:
    """Bytes of the quantized sites' weights with their scales, over those of the same weights in BF16."""
    from safetensors import safe_open

    quantized_sites = set(bundle.plan.quantized_sites)
    stored = elements = 0
    for path in bundle.weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                site, _, key = name.rpartition(".")
                if site in quantized_sites:
                    tensor = file.get_tensor(name)
                    stored += tensor.nbytes
                    elements += tensor.numel() if key == "weight" else 0
    return stored / (2 * elements)


def checkpoint_digest(checkpoint: Path) -> str:
    """First 16 hex digits of the SHA-256 of the weights."""
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()[:16]


def environment(device: torch.device, with_bundle: bool, beam: int, narrow_beam: int, fp8_every: int) -> dict[str, Any]:
    """What the figures were measured with."""
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "seed": SEED,
        "beam_width": beam,
        "command": "python -m examples.groceries.evaluate --data DATA"
        + (" --bundle BUNDLE" if with_bundle else "")
        + f" --device {device.type} --beam {beam}"
        + (f" --narrow-beam {narrow_beam}" if narrow_beam else "")
        + (f" --fp8-every {fp8_every}" if fp8_every > 1 else ""),
    }


def evaluate(
    data: Path,
    checkpoint: Path,
    bundle: Path | None,
    beam: int,
    device: str,
    workers: int,
    earlier: dict[str, Any],
    narrow_beam: int = 0,
    fp8_every: int = 1,
) -> dict[str, Any]:
    """Everything that results.json holds; FP8 figures of the same checkpoint are kept from `earlier`."""
    sequences = load_sequences(data)
    training = check_version(checkpoint, sequences)
    quantized = None if bundle is None else load_bundle(bundle, checkpoint)
    source = Source(data, checkpoint, False, device)
    modes = {"product_number": PRODUCT_NUMBER_ORDER, "random": ANY_ORDER, "basket": NEXT_BASKET}
    beams = {"product_number": beam, "random": narrow_beam or beam, "basket": narrow_beam or beam}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        baseline_task = pool.submit(baselines.last_basket_results, data)  # on the CPU meanwhile
        ours = {name: recommend_all(source, mode, beams[name], workers) for name, mode in modes.items()}
        if counts_basket_items(load_source(source)[2]):
            ours["uncounted"] = recommend_all(source, ANY_ORDER, beams["random"], workers, counted=False)
        simple = baseline_task.result()
    digest = checkpoint_digest(checkpoint)
    results: dict[str, Any] = {
        "ours": {
            **next_item_metrics(ours["product_number"].ranks()),
            "random_order": next_item_metrics(ours["random"].ranks()),
        }
    }
    if "uncounted" in ours:
        # What a client gets that does not say how many items the open basket holds.
        results["ours"]["random_order_uncounted"] = next_item_metrics(ours["uncounted"].ranks())
    for name in (*MAIN_BASELINES, "own_repeat_decayed"):
        results[name] = {**simple["next_item"][name], "random_order": simple["random_order"][name]}
    results["last_basket"] = {"ours": measure_baskets(ours["basket"], sequences, held_out=0), **simple["basket"]}
    if bundle is not None and quantized is not None:
        fp8 = recommend_all(Source(data, bundle, True, device), PRODUCT_NUMBER_ORDER, beam, workers, fp8_every)
        results["fp8_vs_bf16"] = compare(fp8, ours["product_number"]) | describe_bundle(quantized)
    elif earlier.get("environment", {}).get("checkpoint") == digest and "fp8_vs_bf16" in earlier:
        results["fp8_vs_bf16"] = earlier["fp8_vs_bf16"]
    results["environment"] = {
        **environment(torch.device(device), bundle is not None, beam, narrow_beam, fp8_every),
        "checkpoint": digest,
        "parameters": sum(value.numel() for value in load_checkpoint(checkpoint).parameters()),
        "best_epoch": training["best"]["epoch"],
        "validation": training["best"].get("validation"),
    }
    return results


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder that prepare.py wrote")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=positive, default=1, help="processes; on a CPU, one a core (an hour)")
    parser.add_argument("--beam", type=positive, default=64, help="at least 50, for the top-50 overlap")
    parser.add_argument(
        "--narrow-beam", type=not_negative, default=0, help="beam where 10 items are ranked; 0: the same"
    )
    parser.add_argument("--fp8-every", type=positive, default=1, help="compare FP8 on every N-th household")
    parser.add_argument("--out", type=output_file, default=RESULTS)
    arguments = parser.parse_args()
    results = evaluate(
        arguments.data,
        arguments.checkpoint,
        arguments.bundle,
        arguments.beam,
        arguments.device,
        arguments.workers,
        read_earlier(arguments.out),
        arguments.narrow_beam,
        arguments.fp8_every,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    run_command_line(main)
