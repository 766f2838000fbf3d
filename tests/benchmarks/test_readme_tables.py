"""The README's tables are those of the committed results."""

from __future__ import annotations

from benchmarks.readme_tables import README, TABLES, render


def test_readme_shows_the_committed_results() -> None:
    current = README.read_text()
    assert render(current) == current, "run make readme"
    for name in TABLES:
        assert f"<!-- table: {name} -->" in current
