"""What a request says of its open basket is what the model's features are called."""

from __future__ import annotations

import pytest
import torch

from examples.groceries.contexts import basket_items_index
from examples.groceries.open_basket import BASKET_ITEMS, OPEN_BASKET, open_basket_features


@pytest.mark.parametrize("items", [0, 1, 31, 32, 35, 36, 99, 100, 500])
def test_requests_and_training_name_the_same_value(items: int) -> None:
    said = open_basket_features("any_order", items)
    assert OPEN_BASKET.index_of(said["open_basket"]) == 2
    assert BASKET_ITEMS.index_of(said["open_basket_items"]) == basket_items_index(torch.tensor(items)).item() > 0


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="any_order"):
        open_basket_features("alphabetical", 1)
