"""Servers that cases put under stress: the real API process, before the scripted engine or the groceries' bundle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.reliability.case import Setting
from loadtest.bodies import Template, from_histories, read_some_histories
from loka_serve.bundle import MANIFEST_FILE
from loka_serve.catalog.histories import History
from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_server import make_catalog

CHECKPOINT = ROOT / "examples" / "groceries" / "checkpoint"


@contextmanager
def scripted_server(
    setting: Setting, *flags: str, engine: Sequence[str] = (), items: int = 60
) -> Iterator[RunningServer]:
    """A server whose engine takes as long as `engine` says (`--seconds 0.02`) and obeys commands in histories."""
    catalog = setting.scratch / "catalog.safetensors"
    make_catalog(items).save(catalog)
    with running(scripted_command(catalog, *flags, engine=engine)) as server:
        yield server


@contextmanager
def groceries_server(setting: Setting, *flags: str) -> Iterator[RunningServer]:
    """A server of the groceries' trained model on this machine's CPU."""
    bundle = groceries_bundle(setting.work_dir)
    with running([sys.executable, "-m", "loka_serve.serve", "--bundle", str(bundle), "--port", "0", *flags]) as server:
        yield server


def groceries_bundle(work_dir: Path) -> Path:
    """The groceries' bundle; made, with its data, unless it is there (`make demo` makes the same)."""
    data, bundle = work_dir / "data", work_dir / "bundle"
    if not (bundle / MANIFEST_FILE).is_file():
        work_dir.mkdir(parents=True, exist_ok=True)
        _run("examples.groceries.prepare", "--out", str(data))
        _run(
            "loka_serve.build", "--checkpoint", str(CHECKPOINT), "--catalog", str(data / "catalog.jsonl"),
            "--calibration", str(data / "histories.jsonl"), "--out", str(bundle), "--quiet",
        )  # fmt: skip
    return bundle


def groceries_requests(work_dir: Path, most: int = 500, beams: Sequence[int] = (16, 32)) -> list[Template]:
    """Requests with real households' purchases."""
    groceries_bundle(work_dir)
    return from_histories(read_some_histories(work_dir / "data" / "histories.jsonl", most), beams=beams)


def scripted_requests(count: int = 20, num_items: int = 10) -> list[Template]:
    """Requests that the scripted server answers without further ado."""
    return from_histories([History(f"u{user}", [f"item-{user}", "item-7"]) for user in range(count)], num_items)


def _run(module: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)
