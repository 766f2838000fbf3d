"""The two features with which a request says that its history ends inside a basket that is still being filled."""

from __future__ import annotations

from bisect import bisect_right

from loka_serve.models.config import FeatureConfig

# Without this one the model recommends for the next basket; with it, the next item in the order that it names.
OPEN_BASKET = FeatureConfig("open_basket", ("product_number_order", "any_order"))

# Lower bounds of the other feature's values: exact where it is easy to count back, ranges beyond. With "missing" there
# are 40 slots, so that a context of 1024 items has a multiple of 8 slots, which attention kernels like.
BASKET_ITEM_BOUNDS = (*range(32), 32, 36, 42, 50, 60, 76, 100)


def _value(lower: int, following: int | None) -> str:
    if following is None:
        return f"{lower}+"
    return str(lower) if following == lower + 1 else f"{lower}-{following - 1}"


# How many of the last history items are in the open basket.
BASKET_ITEMS = FeatureConfig(
    "open_basket_items",
    tuple(
        _value(lower, following)
        for lower, following in zip(BASKET_ITEM_BOUNDS, (*BASKET_ITEM_BOUNDS[1:], None), strict=True)
    ),
)


def open_basket_features(order: str, items: int) -> dict[str, str]:
    """What a request says whose last `items` history items are in the open basket; order: a value of OPEN_BASKET."""
    if order not in OPEN_BASKET.values:
        raise ValueError(f"order: expected one of {', '.join(OPEN_BASKET.values)}, got {order!r}")
    return {
        OPEN_BASKET.name: order,
        BASKET_ITEMS.name: BASKET_ITEMS.values[bisect_right(BASKET_ITEM_BOUNDS, items) - 1],
    }
