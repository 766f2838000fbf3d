"""`python -m loka_serve.serve` as a user runs it: a built bundle, the reference engine, real requests."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loka_serve.build import main as build
from loka_serve.bundle import Bundle
from loka_serve.catalog.histories import History, read_histories
from loka_serve.decoding.expansion import expand
from loka_serve.engines import load_engine
from loka_serve.engines.base import EngineRequest, RequestBatch
from loka_serve.models.config import PRESETS
from tests.building import build_arguments, write_checkpoint
from tests.server.processes import ROOT, RunningServer, running

SERVE = [sys.executable, "-m", "loka_serve.serve"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny random model, and the histories that it was calibrated on."""
    folder = tmp_path_factory.mktemp("serve")
    assert build(build_arguments(folder, "--recipe", "fp8_row", "--quiet")) == 0
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    command = [
        *SERVE,
        "--bundle",
        str(folder / "bundle"),
        "--port",
        "0",
        "--summary-interval-s",
        "0.5",
        "--allow-debug",
    ]
    with running([*command, "--device", "cpu", "--max-delay-ms", "20", "--allow-debug"]) as server:
        yield server


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Bundle:
    return Bundle.load(folder / "bundle")


def expected_items(bundle: Bundle, history: History, beam_width: int, num_items: int) -> list[tuple[str, float]]:
    """What the engine gives for one request alone, without any server."""
    known = [index for index in map(bundle.catalog.index_of, history.items) if index is not None]
    codes = bundle.catalog.semantic_ids(known[-bundle.config.max_context :])
    features = [feature.index_of(history.features.get(feature.name, "")) for feature in bundle.config.features]
    seen = bundle.catalog.filter(known)
    request = EngineRequest(codes, np.array(features, np.int32), beam_width, seen)
    result = load_engine(bundle, "reference", "cpu", bundle.limits).recommend(RequestBatch((request,)))
    allowed = None if seen is None else seen.allowed_items
    items = expand(result.leaves[0], result.scores[0], bundle.catalog, allowed, num_items)
    return [(bundle.catalog.item_ids[item.item_index], item.score) for item in items]


def test_answers_equal_the_engine_s_own_whatever_shares_the_batch(
    server: RunningServer, folder: Path, bundle: Bundle
) -> None:
    histories = list(read_histories(folder / "histories.jsonl"))[:16]
    beams = [10, 16, 12, 11] * 4

    def ask(index: int) -> dict[str, Any]:
        body = {
            "user_id": histories[index].user_id,
            "history": histories[index].items,
            "features": histories[index].features,
            "num_items": 10,
            "beam_width": beams[index],
            "exclude_history": True,
        }
        response = server.recommend(**body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    assert max(answer["usage"]["batch_size"] for answer in answers) > 1
    for index in (0, 3, 7, 12):
        wanted = expected_items(bundle, histories[index], beams[index], 10)
        given = [(item["item_id"], item["score"]) for item in answers[index]["items"]]
        # Other rows of the batch change the order of float32 sums: scores agree to 1e-4, and where two items are that
        # close they may change places.
        assert [score for _, score in given] == pytest.approx([score for _, score in wanted], abs=1e-4)
        assert len({item for item, _ in given} & {item for item, _ in wanted}) >= 9
    for index, answer in enumerate(answers):
        items = [item["item_id"] for item in answer["items"]]
        assert len(items) == len(set(items)) == 10
        assert not set(items) & set(histories[index].items)
        scores = [item["score"] for item in answer["items"]]
        assert scores == sorted(scores, reverse=True)
        assert answer["usage"]["unknown_items"] == sum(
            bundle.catalog.index_of(item) is None for item in histories[index].items
        )


def test_the_stages_of_a_batch_are_shown_level_by_level(server: RunningServer) -> None:
    server.recommend(history=["item1"], num_items=5, beam_width=12)
    batch = server.client.get("/v1/debug/batches").json()["batches"][0]
    stages = batch["stages_ms"]
    levels = [f"{stage}.{level}" for level in range(3) for stage in ("decode", "selection")]
    assert set(stages) == {"prepare", "context", "decode", "selection", "total", "expand", *levels}
    assert batch["beam_widths"] == [12]
    assert stages["total"] >= stages["context"] + sum(stages[level] for level in levels) > 0
    text = server.client.get("/metrics").text
    assert 'loka_engine_seconds_count{stage="decode"}' in text and "decode.0" not in text


def test_the_same_request_gives_the_same_answer(server: RunningServer) -> None:
    first, second = (server.recommend(history=["item1", "item2"], num_items=16).json() for _ in range(2))
    assert first["items"] == second["items"]
    assert first["request_id"] != second["request_id"]


def test_the_api_process_has_not_loaded_torch_and_the_engine_has(server: RunningServer) -> None:
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.engine_pid()}/maps").read_text()


def test_nothing_is_unpickled_from_a_bundle_to_an_answer(folder: Path) -> None:
    """Python tells of each class that a pickle names; not one does."""
    code = f"""
import pickle, sys
import torch, pyarrow.parquet
from pathlib import Path
from loka_serve.bundle import Bundle
from loka_serve.catalog.catalog import Catalog
from loka_serve.catalog.readers import read_catalog
from loka_serve.engines import load_engine
from loka_serve.server.engine_batches import ComputedBatch, finish, prepare
from loka_serve.server.messages import Batch, WireRequest, decode_to_engine, encode

seen = []
sys.addaudithook(lambda event, given: seen.append(given) if event == "pickle.find_class" else None)
pickle.loads(pickle.dumps(Path))
assert len(seen) == 1, "the hook hears nothing"
seen.clear()
bundle = Bundle.load(Path({str(folder / "bundle")!r}))
catalog = read_catalog(Path({str(folder / "items.jsonl")!r}), codebook_sizes=bundle.config.codebook_sizes)
catalog.save(Path({str(folder / "again.safetensors")!r}))
assert Catalog.load(Path({str(folder / "again.safetensors")!r})).version == catalog.version
engine = load_engine(bundle, "reference", "cpu", bundle.limits)
engine.warmup()
request = WireRequest(b"", [0], 8, 5)
batch = prepare(decode_to_engine(encode(Batch(1, bundle.catalog.version, [request]))), bundle.catalog)
(result,) = finish(ComputedBatch(batch, [(engine.recommend(batch.requests), 0)])).results
assert len(result.items) == 5 * 4, result
assert not seen, seen
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_log_sums_up_while_there_is_something_to_say(server: RunningServer) -> None:
    for _ in range(3):
        server.recommend(history=[])
    number = r"\d+(\.\d+)?"
    figures = (r"{n} req/s", r"p50 {n} ms", r"p99 {n} ms", r"mean batch {n}", r"queue \d+", r"ok \d+")
    server.wait_for_log("INFO api: " + ", ".join(figures).format(n=number), 5)
    assert "Traceback" not in server.log


def test_every_row_of_a_real_test_set_is_answered_from_the_catalog(amazon_industrial: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", PRESETS["tiny"])
    inputs = {"checkpoint": tmp_path / "checkpoint", "catalog": amazon_industrial, "out": tmp_path / "bundle"}
    inputs["calibration"] = amazon_industrial / "test.csv"
    arguments = [part for flag, path in inputs.items() for part in (f"--{flag}", str(path))]
    arguments += ["--calibration-rows", "8", "--gate-rows", "8", "--min-top-k-overlap", "0", "--recipe", "fp8_row"]
    assert build([*arguments, "--device", "cpu", "--quiet"]) == 0
    semantic_ids = {tuple(row) for row in Bundle.load(tmp_path / "bundle").catalog.trie.semantic_ids().tolist()}
    rows = list(itertools.islice(read_histories(amazon_industrial / "test.csv"), 500))
    command = [*SERVE, "--bundle", str(tmp_path / "bundle"), "--port", "0", "--device", "cpu"]
    with running(command) as server, ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda row: server.recommend(user_id=row.user_id, history=row.items), rows))
    assert [response.status_code for response in responses] == [200] * 500
    for response in responses:
        items = response.json()["items"]
        assert len(items) == len({item["item_id"] for item in items}) == 20
        assert {tuple(item["semantic_id"]) for item in items} <= semantic_ids


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SERVE, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_changed_byte_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(folder / "bundle", tmp_path / "bundle"))
    weights = next(iter(sorted(damaged.glob("weights-*.safetensors"))))
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    result = serve("--bundle", str(damaged), "--port", "0", "--device", "cpu")
    assert result.returncode == 2
    assert f"{weights}: changed since it was written" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--bundle (or LOKA_BUNDLE) is missing: expected an existing directory"),
        (["--bundle", "{tmp}", "--max-batch", "x"], "--max-batch: expected a whole number from 0 to 4096, got 'x'"),
        (["--bundle", "{tmp}"], "{tmp}: not a bundle: expected a directory with bundle.json"),
        (["--bundle", "{tmp}", "--port", "{taken}"], "--host 127.0.0.1 --port {taken}: cannot listen there"),
        (["--bundle", "{tmp}", "--host", "no.such.host.invalid"], "--host: expected an address of this machine"),
    ],
)  # fmt: skip
def test_a_bad_start_is_one_line_and_status_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = {"tmp": str(tmp_path), "taken": str(taken.getsockname()[1])}
        result = serve(*(argument.format(**words) for argument in arguments))
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message.format(**words)}")
    assert len(result.stderr.splitlines()) == 1


def test_help_names_every_flag_and_its_default() -> None:
    result = serve("--help")
    assert result.returncode == 0
    for words in ("--bundle DIR", "(required)", "--port N", "(default: 8000)", "LOKA_MAX_BATCH=8"):
        assert words in result.stdout


def test_bundle_of_the_test_has_features(bundle: Bundle) -> None:
    """What the comparison above relies on."""
    assert [feature.name for feature in bundle.config.features] == ["segment"]
    assert json.loads((bundle.path / "bundle.json").read_text())["engine"] == "reference"
