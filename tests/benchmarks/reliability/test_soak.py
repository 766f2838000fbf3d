"""What the soak makes of its samples."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reliability.cases.soak import drift_percent, slope_per_minute


def test_the_slope_is_per_minute_and_not_moved_by_single_jumps() -> None:
    times = np.arange(0.0, 600.0, 5.0)
    resident = 300.0 + 2.5 * times / 60.0
    assert slope_per_minute(times, resident) == pytest.approx(2.5)
    resident[40:43] += 200.0
    assert slope_per_minute(times, resident) == pytest.approx(2.5, abs=0.02)


def test_drift_compares_the_ends() -> None:
    assert drift_percent(np.array([100.0] * 10 + [80.0] * 10 + [97.0] * 10)) == pytest.approx(3.0)
    assert drift_percent(np.array([100.0] * 9 + [10.0] + [100.0] * 20)) == 0.0
