"""Fuzzes the decoding of bodies with atheris (extra `fuzz`), guided by coverage, until something breaks or time is up.

python -m tests.fuzz.bodies [-max_total_time=600] [other options of libFuzzer] [FOLDER for what it finds]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["loka_serve.server", "tests.fuzz"]):
    from tests.fuzz.target import fuzz_one, served
from tests.fuzz.mutations import mutate_json

JSON_SHARE = 0.5
HERE = Path(__file__).parent


def main() -> None:
    """Run until told to stop; what breaks it is written to `crash-*` and ends the process with a trace."""
    served()  # before the clock of the first input
    options = ["-max_len=4096", "-timeout=5", "-rss_limit_mb=2048", f"-dict={HERE / 'json.dict'}"]
    arguments = [sys.argv[0], *options, *sys.argv[1:], str(HERE / "corpus")]
    atheris.Setup(arguments, take, custom_mutator=mutate)
    atheris.Fuzz()


def take(data: bytes) -> None:
    """libFuzzer wants no result."""
    fuzz_one(data)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """One time in two a value of the JSON, else whatever libFuzzer does to bytes."""
    source = random.Random(seed)
    changed = mutate_json(data, source) if source.random() < JSON_SHARE else None
    return atheris.Mutate(data, most) if changed is None or len(changed) > most else changed


if __name__ == "__main__":
    main()
