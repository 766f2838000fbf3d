"""Ten minutes of coverage-guided fuzzing of what decodes bodies."""

from __future__ import annotations

import re
import subprocess
import sys

from benchmarks.environment import ROOT
from benchmarks.reliability.case import Case, Figure, Setting

SECONDS, QUICK_SECONDS = 600, 5
LEAST_RUNS_A_SECOND = 100  # below that the fuzzer was not at work
_DONE = re.compile(r"^Done (\d+) runs in (\d+) second", re.MULTILINE)
_COVERED = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)/.* rss: (\d+)Mb")


def fuzz_bodies(setting: Setting) -> list[Figure]:
    """atheris on the decoders of all routes; a fault ends it early with a trace, as does an input of 5 s or 2 GiB."""
    seconds = QUICK_SECONDS if setting.quick else SECONDS
    command = [sys.executable, "-m", "tests.fuzz.bodies", f"-max_total_time={seconds}"]
    command += [f"-artifact_prefix={setting.scratch}/", str(setting.scratch)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    done, covered = _DONE.search(ended.stderr), _COVERED.findall(ended.stderr)
    if done is None or not covered or ended.returncode:
        print(ended.stderr[-4000:], file=sys.stderr)
    runs = int(done[1]) if done else 0
    edges, features, inputs, resident = map(int, covered[-1]) if covered else (0, 0, 0, 0)
    return [
        Figure("faults", int(ended.returncode != 0), most=0),
        Figure("minutes", seconds / 60),
        Figure("inputs", runs, least=LEAST_RUNS_A_SECOND * seconds),
        Figure("branches covered", edges),
        Figure("features covered", features),
        Figure("inputs kept", inputs),
        Figure("memory", resident, "MiB"),
    ]


CASES = (Case("fuzz_bodies", "10 minutes' fuzzing of the body decoders", fuzz_bodies, slow=True, quick=False),)
