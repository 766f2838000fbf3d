"""Settings of the drift guard."""

from __future__ import annotations

from typing import Any

import pytest

from loka_serve.drift.options import DriftOptions
from loka_serve.errors import EngineError


def test_options_travel_as_json() -> None:
    options = DriftOptions(sample_every=3, window=7, psi_limit=0.4, amax_ratio=1.5)
    assert DriftOptions.from_json(options.to_json()) == options
    assert (options.calm_psi, options.calm_amax_ratio) == (0.2, 1.25)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("sample_every", value) for value in (-1, 1.5, True)],
        *[("window", value) for value in (0, 2.0)],
        *[("psi_limit", value) for value in (0.0, float("inf"), float("nan"), True, "1")],
        *[("amax_ratio", value) for value in (1.0, float("nan"), None)],
    ],
)
def test_bad_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"{field} {value!r}: expected"):
        DriftOptions(**{field: value})
