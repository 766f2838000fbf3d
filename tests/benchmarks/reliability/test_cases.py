"""Every case in its quick form: it measures a real server, and holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reliability.__main__ import find_cases, run_case
from benchmarks.reliability.case import Case

QUICK = [case for case in find_cases().values() if case.quick]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_quick(case: Case, tmp_path: Path) -> None:
    row = run_case(case, quick=True, work_dir=tmp_path)
    assert row["error"] is None
    assert [figure for figure in row["figures"] if not figure["held"]] == []
    assert row["held"]
