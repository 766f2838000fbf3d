"""The catalog benchmark compiles a real file in a process of its own."""

from __future__ import annotations

from benchmarks.catalog import measure


def test_a_small_catalog_is_compiled_and_weighed() -> None:
    row = measure(2_000)
    assert row["items"] == 2_000 and row["compile_seconds"] > 0 and row["compiled_mib"] > 0.01
    assert row["peak_rss_mib"] >= row["rss_before_mib"] > 20
