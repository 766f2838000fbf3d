"""The fuzz target over its corpus and over a second of mutations: refused or accepted, nothing else."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from loka_serve.server.problems import INTERNAL, ProblemError
from tests.fuzz import target
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.fuzz.target import fuzz_one

CORPUS = {path.name: path.read_bytes() for path in sorted((Path(__file__).parent / "corpus").iterdir())}
REFUSED = {"recommend_twice": "body", "batch": "body", "infer_huge_number": "parameters.timeout"}
SECONDS = 1.0


@pytest.mark.parametrize("name", CORPUS)
def test_each_seed_is_what_it_is_meant_to_be(name: str) -> None:
    assert fuzz_one(CORPUS[name]) == REFUSED.get(name, "ok")


def test_no_mutation_of_a_seed_breaks_the_decoders() -> None:
    source = random.Random(0)
    seeds = list(CORPUS.values())
    outcomes: Counter[str] = Counter()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        seed = source.choice(seeds)
        changed = mutate_json(seed, source) if source.random() < 0.5 else mutate_bytes(seed, source)
        outcomes[fuzz_one(changed or b"")] += 1
    assert outcomes.total() > 200
    assert 0 < outcomes["ok"] < outcomes.total()
    assert len(outcomes) > 5  # many fields are named, not always the whole body


def test_the_target_reports_what_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(body: bytes) -> None:
        raise ProblemError(INTERNAL, "told to")

    monkeypatch.setattr(target, "decode_recommend", broken)
    with pytest.raises(AssertionError):
        fuzz_one(CORPUS["recommend"])
    with pytest.raises(AssertionError):
        target.assert_keys_once(b'{"a": 1, "a": 2}')
