"""Prepares the groceries data: purchase sequences, a catalog with semantic IDs, and test histories.

python -m examples.groceries.prepare --out DIR [--recompute]

Writes DIR/sequences.npz (for training and evaluation), DIR/catalog.jsonl and DIR/histories.jsonl (for
`python -m loka_serve.build`). Semantic IDs come from the committed semantic_ids.npy, because another BLAS may round an
SVD otherwise and every checkpoint is bound to its IDs; --recompute derives them afresh and replaces that file.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.groceries import semantic_ids as derivation
from examples.groceries.open_basket import OPEN_BASKET, open_basket_features
from examples.groceries.purchases import (
    GroceriesError,
    Product,
    Purchases,
    data_directory,
    read_demographics,
    read_products,
    read_purchases,
)
from loka_serve.command_line import CommandParser, run_command_line

SEED = 2017
CODEBOOK_SIZES = (256, 256, 256)
SEMANTIC_IDS = Path(__file__).parent / "semantic_ids.npy"
# Weights of the parts of an item's embedding (each part has unit rows): co-purchase in a basket, purchase by the same
# households, and the product hierarchy.
EMBEDDING_WEIGHTS = {"baskets": 1.0, "households": 0.6, "type": 0.6, "category": 0.5, "department": 0.3, "brand": 0.2}
REQUESTS = ("next_basket", *OPEN_BASKET.values)  # what the histories ask for, in turn


@dataclass(frozen=True)
class Sequences:
    """What training and evaluation read: the purchases in both orders, and every item's semantic ID.

    items, random_items, from_the_end, households int32 [N] by row; household_offsets int64 [H + 1];
    semantic_ids int32 [items, levels]; features: household number -> feature name -> value.
    """

    product_ids: NDArray[np.int64]
    household_ids: NDArray[np.int64]
    items: NDArray[np.int32]
    random_items: NDArray[np.int32]
    from_the_end: NDArray[np.int32]
    households: NDArray[np.int32]
    household_offsets: NDArray[np.int64]
    semantic_ids: NDArray[np.int32]
    codebook_sizes: tuple[int, ...]
    features: tuple[Mapping[str, str], ...]

    @property
    def version(self) -> str:
        """First 16 hex digits of a SHA-256 over products and semantic IDs: what a checkpoint is bound to."""
        content = hashlib.sha256(np.asarray(self.codebook_sizes, "<i8").tobytes())
        content.update(self.product_ids.astype("<i8").tobytes())
        content.update(self.semantic_ids.astype("<i4").tobytes())
        return content.hexdigest()[:16]


def save_sequences(sequences: Sequences, directory: Path) -> None:
    """Writes DIR/sequences.npz; strings travel as one JSON array so that nothing needs pickle."""
    arrays = {field.name: getattr(sequences, field.name) for field in fields(sequences) if field.name != "features"}
    features = np.frombuffer(json.dumps([dict(row) for row in sequences.features]).encode(), np.uint8)
    np.savez_compressed(directory / "sequences.npz", features=features, **arrays)


def load_sequences(directory: Path) -> Sequences:
    """Reads what `save_sequences` wrote."""
    path = directory / "sequences.npz"
    if not path.exists():
        raise GroceriesError(f"{path} does not exist: run python -m examples.groceries.prepare --out {directory}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
        arrays["features"] = tuple(json.loads(arrays["features"].tobytes()))
        arrays["codebook_sizes"] = tuple(int(size) for size in arrays["codebook_sizes"])
        return Sequences(**arrays)
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise GroceriesError(
            f"{path}: not what this version's prepare.py writes ({type(error).__name__}: {error}): prepare it again"
        ) from error


def item_embeddings(
    purchases: Purchases, products: list[Product], training: NDArray[np.bool_], seed: int
) -> NDArray[np.float64]:
    """Mixed item embeddings [items, width] from the training rows and the product hierarchy only."""
    generator = np.random.default_rng(seed)
    count = len(purchases.product_ids)
    items, baskets = purchases.items[training], purchases.baskets[training]
    parts = {
        "baskets": derivation.co_purchase_embeddings(items, baskets, count, 64, generator),
        "households": derivation.household_embeddings(items, purchases.households[training], count, 32, generator),
    }
    for name in ("type", "category", "department", "brand"):
        values = [getattr(product, name) for product in products]
        parts[name] = derivation.attribute_embeddings(values, 48, generator)
    return np.concatenate([weight * parts[name] for name, weight in EMBEDDING_WEIGHTS.items()], axis=1)


def derive_semantic_ids(
    purchases: Purchases, products: list[Product], codebook_sizes: tuple[int, ...], last_level: str, seed: int
) -> NDArray[np.int32]:
    """Semantic IDs int32 [items, 3] from everything but each household's last basket."""
    training = purchases.baskets_from_the_end() > 0
    embeddings = item_embeddings(purchases, products, training, seed)
    weights = np.sqrt(1.0 + np.bincount(purchases.items[training], minlength=len(purchases.product_ids)))
    make = {"residual": derivation.residual_semantic_ids, "shelf": derivation.shelf_order_semantic_ids}[last_level]
    return make(embeddings, weights, codebook_sizes, np.random.default_rng(seed + 1))


def load_semantic_ids(path: Path, item_count: int) -> tuple[NDArray[np.int32], tuple[int, ...]]:
    """(semantic IDs int32 [items, levels], codebook sizes) of a file whose first row holds the sizes."""
    if not path.exists():
        raise GroceriesError(f"{path} does not exist; --recompute derives it")
    stored = np.load(path, allow_pickle=False).astype(np.int32)
    sizes, codes = stored[0], stored[1:]
    if len(codes) != item_count or (codes >= sizes).any() or len(np.unique(codes, axis=0)) != item_count:
        raise GroceriesError(f"{path}: expected {item_count} distinct semantic IDs below the codebook sizes {sizes}")
    return codes, tuple(int(size) for size in sizes)


ABBREVIATIONS = {
    "FRZN": "FROZEN",
    "SS": "SINGLE-SERVE",
    "DNRS": "DINNERS",
    "PKLD": "PICKLED",
    "VEG": "VEGETABLES",
    "DRNKS": "DRINKS",
    "PK": "PACK",
    "PKG": "PACKAGE",
    "BKFST": "BREAKFAST",
    "REFRGRATD": "REFRIGERATED",
    "SFT": "SOFT",
    "BTL": "BOTTLE",
    "CRBNTD": "CARBONATED",
    "GM": "GENERAL MERCHANDISE",
    "CHOC": "CHOCOLATE",
    "MLK": "MILK",
    "WHT": "WHITE",
}


def readable(text: str) -> str:
    """An upper-case label of the data as a person would write it."""
    words = text.replace("/", " / ").replace(":", " ").split()
    return " ".join(ABBREVIATIONS.get(word, word) for word in words).replace(" / ", "/").capitalize()


def product_name(product: Product, number: int) -> str:
    """A readable name: type, category where the type does not already say it, size, private label."""
    kind = readable(product.type) or readable(product.category) or readable(product.department) or f"Product {number}"
    category = readable(product.category)
    first_word = category.split(" ")[0].split("/")[0].rstrip("s").lower()
    name = kind if not category or first_word in kind.lower() else f"{category}: {kind[:1].lower()}{kind[1:]}"
    size = f", {product.size.lower()}" if product.size else ""
    return name + size + (" (private label)" if product.brand == "Private" else "")


def catalog_rows(sequences: Sequences, products: list[Product]) -> Iterator[dict[str, Any]]:
    """One JSON object per product; popularity counts purchases outside the last baskets."""
    popularity = np.bincount(sequences.items[sequences.from_the_end > 0], minlength=len(products))
    for number, product in enumerate(products):
        product_id = int(sequences.product_ids[number])
        attributes = {
            "department": product.department,
            "category": product.category,
            "type": product.type,
            "brand": product.brand,
            "size": product.size,
        }
        yield {
            "item_id": str(product_id),
            "semantic_id": sequences.semantic_ids[number].tolist(),
            "popularity": int(popularity[number]),
            "name": product_name(product, product_id),
            **{name: value for name, value in attributes.items() if value},
        }


def history_rows(sequences: Sequences) -> Iterator[dict[str, Any]]:
    """One JSON object per household; they ask in turn for what REQUESTS names.

    The next basket: everything before the last one, and that as the target. An open basket: the history ends inside the
    basket before the last one, after a seeded number of items, and the rest of it is the target; the features say so.
    Items of one basket come in the seeded random order where product numbers are not asked for: they share a time.
    """
    ids, generator = sequences.product_ids, np.random.default_rng(SEED)
    for household, (start, end) in enumerate(
        zip(sequences.household_offsets[:-1], sequences.household_offsets[1:], strict=True)
    ):
        request, from_the_end = REQUESTS[household % len(REQUESTS)], sequences.from_the_end[start:end]
        items = (sequences.items if request == "product_number_order" else sequences.random_items)[start:end]
        features = dict(sequences.features[household])
        basket = 1 if request in OPEN_BASKET.values and (from_the_end == 1).any() else 0
        first, size = int((from_the_end > basket).sum()), int((from_the_end == basket).sum())
        filled = int(generator.integers(size)) if basket else 0
        if basket:
            features |= open_basket_features(request, filled)
        yield {
            "user_id": str(sequences.household_ids[household]),
            "history": [str(ids[item]) for item in items[: first + filled]],
            "target": [str(ids[item]) for item in items[first + filled : first + size]],
            "features": features,
        }


def write_lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def prepare(
    out: Path, semantic_ids_path: Path, recompute: bool, codebook_sizes: tuple[int, ...], last_level: str
) -> Sequences:
    """Writes all three files and returns the sequences."""
    directory = data_directory()
    purchases, described = read_purchases(directory), read_products(directory)
    products = [described.get(int(number), Product("", "", "", "", "")) for number in purchases.product_ids]
    if recompute:
        codes = derive_semantic_ids(purchases, products, codebook_sizes, last_level, SEED)
        np.save(semantic_ids_path, np.concatenate([[codebook_sizes], codes]).astype(np.uint16))
    codes, codebook_sizes = load_semantic_ids(semantic_ids_path, len(products))
    demographics = read_demographics(directory)
    sequences = Sequences(
        product_ids=purchases.product_ids,
        household_ids=purchases.household_ids,
        items=purchases.items,
        random_items=purchases.random_order(SEED),
        from_the_end=purchases.baskets_from_the_end(),
        households=purchases.households,
        household_offsets=purchases.household_offsets,
        semantic_ids=codes,
        codebook_sizes=codebook_sizes,
        features=tuple(demographics.get(int(household), {}) for household in purchases.household_ids),
    )
    out.mkdir(parents=True, exist_ok=True)
    save_sequences(sequences, out)
    write_lines(out / "catalog.jsonl", catalog_rows(sequences, products))
    write_lines(out / "histories.jsonl", history_rows(sequences))
    return sequences


def main() -> None:
    parser = CommandParser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--semantic-ids", type=Path, default=SEMANTIC_IDS, help="file to read, or to write")
    parser.add_argument("--recompute", action="store_true", help="derive the semantic IDs afresh (about a minute)")
    parser.add_argument("--codebook-sizes", type=int, nargs=3, default=CODEBOOK_SIZES, help="with --recompute")
    parser.add_argument("--last-level", choices=("residual", "shelf"), default="shelf", help="with --recompute")
    arguments = parser.parse_args()
    sequences = prepare(
        arguments.out,
        arguments.semantic_ids,
        arguments.recompute,
        tuple(arguments.codebook_sizes),
        arguments.last_level,
    )
    print(
        f"{len(sequences.product_ids)} products, {len(sequences.household_ids)} households, "
        f"{len(sequences.items)} purchases; codebooks {sequences.codebook_sizes}, version {sequences.version}; "
        f"written to {arguments.out}"
    )


if __name__ == "__main__":
    run_command_line(main)
