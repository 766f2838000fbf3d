"""The stability index against closed forms, and what a window holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loka_serve.drift.window import OCTAVES, Inputs, Window, population_stability_index


def counts(**by_octave: int) -> np.ndarray:
    histogram = np.zeros(OCTAVES, np.int64)
    for index, count in enumerate(by_octave.values()):
        histogram[30 + index] = count
    return histogram


def batch(octaves: np.ndarray, absmax: float = 1.0, requests: int = 10) -> Inputs:
    return Inputs(octaves, absmax, requests)


def test_stability_index_of_two_bins() -> None:
    even, tilted = counts(a=10**9, b=10**9), counts(a=10**9, b=3 * 10**9)
    # (1/4 - 1/2) ln(1/2) + (3/4 - 1/2) ln(3/2) = ln(3) / 4; half a count in 10**9 is beyond the sixth digit.
    assert population_stability_index(even, tilted) == pytest.approx(math.log(3) / 4, rel=1e-6)
    assert population_stability_index(tilted, even) == pytest.approx(math.log(3) / 4, rel=1e-6)
    assert population_stability_index(even, 7 * even) == pytest.approx(0.0, abs=1e-12)


def test_an_empty_bin_costs_what_half_a_count_does() -> None:
    p, q = np.array([100.5, 0.5]) / 101, np.array([50.5, 50.5]) / 101
    expected = float(((q - p) * np.log(q / p)).sum())
    assert population_stability_index(counts(a=100, b=0), counts(a=50, b=50)) == pytest.approx(expected, rel=1e-12)


def test_without_drift_the_index_is_what_sampling_alone_gives() -> None:
    generator, bins, n, m = np.random.default_rng(0), 8, 20_000, 2_000
    shares = np.zeros(OCTAVES)
    shares[20 : 20 + bins] = generator.dirichlet(np.full(bins, 5.0))
    draws = [
        population_stability_index(generator.multinomial(n, shares), generator.multinomial(m, shares))
        for _ in range(400)
    ]
    # Mean (B - 1)(1/n + 1/m) (Yurdakul and Naranjo, 2020); 400 draws of a chi-square of 7 have its mean within 8 %.
    assert np.mean(draws) == pytest.approx((bins - 1) * (1 / n + 1 / m), rel=0.1)


def test_a_window_lets_go_of_what_the_others_can_do_without() -> None:
    window = Window(batch(counts(a=100)), capacity=30)
    for _ in range(2):
        window.add(batch(counts(a=7)))
        assert not window.is_full
    window.add(batch(counts(a=7)))
    assert window.is_full and window.stability_index() == pytest.approx(0.0)
    for _ in range(3):
        window.add(batch(counts(a=0, b=5)))
    # Nothing of the first three is left.
    expected = population_stability_index(counts(a=100), counts(a=0, b=15))
    assert window.stability_index() == pytest.approx(expected)
    window.clear()
    assert not window.is_full


def test_a_large_batch_alone_is_no_window() -> None:
    window = Window(batch(counts(a=1)), capacity=30)
    for _ in range(2):
        window.add(batch(counts(a=1), requests=100))
    assert not window.is_full
    window.add(batch(counts(a=1), requests=100))
    assert window.is_full


def test_a_window_without_values_is_not_judged() -> None:
    window = Window(batch(counts(a=1)), capacity=3)
    for _ in range(3):
        window.add(batch(counts(a=0)))
    assert not window.is_full


def test_magnitudes_count_once_three_batches_reach_them() -> None:
    window = Window(batch(counts(a=1), absmax=2.0), capacity=50)
    for absmax in (1.0, 1000.0, 3.0, 1.5, 800.0):
        window.add(batch(counts(a=1), absmax))
    assert window.amax_ratio() == 1.5  # 3.0 over 2.0: the two larger ones are odd batches
    nothing = Window(batch(counts(a=1), absmax=0.0), capacity=1)
    for absmax in (0.0, 0.0, 0.0):
        nothing.add(batch(counts(a=1), absmax))
    assert nothing.amax_ratio() == 0.0
    for absmax in (0.1, 0.1, 0.1):
        nothing.add(batch(counts(a=1), absmax))
    assert nothing.amax_ratio() == math.inf


def test_inputs_from_a_bundle_s_summary() -> None:
    inputs = Inputs.from_summary({"-40": 3, "0": 5, "23": 7}, 2.5)
    assert (inputs.octaves[0], inputs.octaves[40], inputs.octaves[63], inputs.octaves.sum()) == (3, 5, 7, 15)
    assert inputs.absmax == 2.5
    for octave in ("24", "-41", "x"):
        with pytest.raises(ValueError, match=octave):
            Inputs.from_summary({octave: 1}, 1.0)
