"""Random small catalogs for property tests: few codes and values, so that collisions are common."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from loka_serve.catalog.catalog import Catalog

DEPARTMENTS = ("dairy", "bakery", "Käse")
TAGS = ("fresh", "vegan", "cold")


@dataclass(frozen=True)
class Items:
    """Columns of items, as :meth:`Catalog.build` takes them."""

    item_ids: list[str]
    semantic_ids: list[list[int]]
    popularity: list[float]
    attributes: dict[str, list[object]]
    codebook_sizes: list[int]

    def build(self, order: list[int] | None = None) -> Catalog:
        """The catalog of the items, given in another order if asked."""
        rows = range(len(self.item_ids)) if order is None else order
        return Catalog.build(
            [self.item_ids[row] for row in rows],
            [self.semantic_ids[row] for row in rows],
            [self.popularity[row] for row in rows],
            {name: [values[row] for row in rows] for name, values in self.attributes.items()},
            self.codebook_sizes,
        )


@st.composite
def items(draw: st.DrawFn) -> Items:
    """1 to 14 items, 2 to 5 levels, codebooks of 1 to 4 codes each."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    item_ids = draw(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=14, unique=True))

    def column(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=len(item_ids), max_size=len(item_ids)))

    semantic_id = st.tuples(*(st.integers(0, size - 1) for size in sizes)).map(list)
    return Items(
        item_ids=item_ids,
        semantic_ids=column(semantic_id),  # type: ignore[arg-type]
        popularity=column(st.integers(0, 2).map(float)),  # type: ignore[arg-type]
        attributes={
            "department": column(st.sampled_from((*DEPARTMENTS, None))),
            "tags": column(st.lists(st.sampled_from(TAGS), max_size=4) | st.none()),
            "organic": column(st.booleans() | st.none()),
        },
        codebook_sizes=sizes,
    )
