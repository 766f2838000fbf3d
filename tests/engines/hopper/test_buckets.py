"""Which sizes are captured, and which of them a batch runs in."""

from __future__ import annotations

import math

import pytest

from loka_serve.engines.base import EngineLimits
from loka_serve.engines.hopper.buckets import Bucket, Buckets
from loka_serve.engines.hopper.options import HopperOptions
from loka_serve.errors import EngineError

LIMITS = EngineLimits(batch=12, beam=300, context=3000, levels=3)


def test_sizes_grow_up_to_the_limits() -> None:
    buckets = Buckets.of(LIMITS, HopperOptions())
    assert buckets.batches == (1, 2, 3, 4, 6, 8, 12)
    assert buckets.beams == (128, 256, 300)
    assert buckets.contexts == (512, 2048, 3000)
    assert Buckets.of(EngineLimits(40, 16, 64, 3), HopperOptions()).batches == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40)
    assert Buckets.of(EngineLimits(1, 16, 64, 3), HopperOptions()) == Buckets((1,), (16,), (64,))


def test_sizes_of_the_options_end_with_the_limit() -> None:
    buckets = Buckets.of(LIMITS, HopperOptions(batches=(3,), beams=(50, 300), contexts=(100,)))
    assert buckets == Buckets((3, 12), (50, 300), (100, 3000))


def test_every_size_within_the_limits_has_the_smallest_bucket_that_holds_it() -> None:
    buckets = Buckets.of(LIMITS, HopperOptions())
    for batch in range(1, 13):
        for beam in (1, 128, 129, 300):
            for context in (0, 512, 513, 3000):
                chosen = buckets.choose(batch, beam, context)
                holding = [
                    bucket
                    for bucket in buckets.all()
                    if bucket.batch >= batch and bucket.beam >= beam and bucket.context >= context
                ]
                assert chosen == min(holding)


def test_the_largest_comes_first() -> None:
    everything = Buckets.of(LIMITS, HopperOptions()).all()
    assert everything[0] == Bucket(12, 300, 3000)
    assert len(everything) == len(set(everything)) == 7 * 3 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": (13,)}, r"batches \(13,\): expected sizes up to the limit 12"),
        ({"beams": (301,)}, r"beams \(301,\)"),
    ],
)
def test_sizes_beyond_the_limits_are_refused(options: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Buckets.of(LIMITS, HopperOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batches", (4, 2)),
        ("beams", (0,)),
        ("contexts", (5, 5)),
        ("batches", (True, 2)),
        ("beams", (16.0, 32)),
        ("beams", (math.nan,)),
        ("contexts", ("512",)),
        ("contexts", 512),
        ("contexts", [512]),
        ("tune", 1),
        ("graphs", "no"),
        ("context_precision", "fp4"),
        ("top_k", "heap"),
        ("memory_share", 0.0),
        ("memory_share", 1.1),
        ("memory_share", math.nan),
        ("memory_share", math.inf),
        ("memory_share", True),
        ("memory_share", "0.9"),
        ("catalog_headroom", 0.5),
        ("catalog_headroom", math.nan),
        ("catalog_headroom", math.inf),
        ("catalog_headroom", True),
        ("catalog_headroom", None),
    ],
)
def test_options_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(EngineError, match=rf"^{field} .*: expected "):
        HopperOptions(**{field: value})  # type: ignore[arg-type]
