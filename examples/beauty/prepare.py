"""Prepares the Beauty data: sequences with semantic IDs, and a catalog.

python -m examples.beauty.prepare --data FOLDER --out DIR [--recompute]

FOLDER holds sequences.txt. Writes DIR/sequences.npz (for training and evaluation) and DIR/catalog.jsonl; the
histories for `python -m loka_serve.build` are sequences.txt itself. Semantic IDs come from the committed
semantic_ids.npy, because another BLAS may round an SVD otherwise and every checkpoint is bound to its IDs; --recompute
derives them afresh and replaces that file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.beauty.co_occurrence import following_counts
from examples.beauty.sequences import SOURCE_FILE, Sequences, read_events, save_sequences
from examples.groceries.prepare import load_semantic_ids, write_lines
from examples.groceries.semantic_ids import (
    positive_pointwise_mutual_information,
    residual_semantic_ids,
    truncated_svd,
    unit_rows,
)
from loka_serve.command_line import CommandParser, run_command_line

SEED = 2017
CODEBOOK_SIZES = (256, 256, 256)
RANK = 64
SEMANTIC_IDS = Path(__file__).parent / "semantic_ids.npy"


def derive_semantic_ids(sequences: Sequences, codebook_sizes: tuple[int, ...], seed: int) -> NDArray[np.int32]:
    """Distinct semantic IDs int32 [items, 3]: residual k-means over the SVD of the PPMI of co-occurrence in a window.

    From the training events only. The data numbers items in the order in which users first meet them, test items
    included, so that neighbouring numbers tell who took what: items are shuffled first, and nothing depends on them.
    """
    generator = np.random.default_rng(seed)
    count = len(sequences.item_ids)
    shuffled = generator.permutation(count)
    follows = following_counts(sequences)[shuffled][:, shuffled]
    vectors, values = truncated_svd(positive_pointwise_mutual_information(follows + follows.T), RANK, generator)
    vectors = unit_rows(vectors * np.sqrt(values))
    frequency = np.bincount(sequences.items[sequences.training_rows()], minlength=count)[shuffled]
    # Of an item that training never saw next to another nothing is known: anywhere, so that no prefix overflows.
    unknown = ~vectors.any(axis=1)
    vectors[unknown] = unit_rows(generator.standard_normal((int(unknown.sum()), vectors.shape[1])))
    weights = np.where(unknown, 1e-6, np.sqrt(1.0 + frequency))
    codes = np.empty((count, len(codebook_sizes)), np.int32)
    codes[shuffled] = residual_semantic_ids(vectors, weights, codebook_sizes, generator)
    return codes


def catalog_rows(sequences: Sequences) -> Iterator[dict[str, Any]]:
    """One JSON object an item; popularity counts training events."""
    popularity = np.bincount(sequences.items[sequences.training_rows()], minlength=len(sequences.item_ids))
    for number, item_id in enumerate(sequences.item_ids):
        yield {
            "item_id": str(item_id),
            "semantic_id": sequences.semantic_ids[number].tolist(),
            "popularity": int(popularity[number]),
        }


def prepare(
    data: Path, out: Path, semantic_ids_path: Path, recompute: bool, codebook_sizes: tuple[int, ...] = CODEBOOK_SIZES
) -> Sequences:
    """Writes both files and returns the sequences."""
    item_ids, user_ids, items, offsets = read_events(data / SOURCE_FILE)
    if recompute:
        nothing = np.zeros((len(item_ids), len(codebook_sizes)), np.int32)
        bare = Sequences(item_ids, user_ids, items, offsets, nothing, codebook_sizes)
        codes = derive_semantic_ids(bare, codebook_sizes, SEED)
        np.save(semantic_ids_path, np.concatenate([[codebook_sizes], codes]).astype(np.uint16))
    codes, codebook_sizes = load_semantic_ids(semantic_ids_path, len(item_ids))
    sequences = Sequences(item_ids, user_ids, items, offsets, codes, codebook_sizes)
    out.mkdir(parents=True, exist_ok=True)
    save_sequences(sequences, out)
    write_lines(out / "catalog.jsonl", catalog_rows(sequences))
    return sequences


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with sequences.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--semantic-ids", type=Path, default=SEMANTIC_IDS, help="file to read, or to write")
    parser.add_argument("--recompute", action="store_true", help="derive the semantic IDs afresh (half a minute)")
    parser.add_argument("--codebook-sizes", type=int, nargs=3, default=CODEBOOK_SIZES, help="with --recompute")
    arguments = parser.parse_args()
    sequences = prepare(
        arguments.data,
        arguments.out,
        arguments.semantic_ids,
        arguments.recompute,
        tuple(arguments.codebook_sizes),
    )
    print(
        f"{len(sequences.item_ids)} items, {sequences.users} users, {len(sequences.items)} events; "
        f"codebooks {sequences.codebook_sizes}, version {sequences.version}; written to {arguments.out}"
    )


if __name__ == "__main__":
    run_command_line(main)
