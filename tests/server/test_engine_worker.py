"""The engine process's side: filters compiled, leaves expanded, bad rows alone, catalogs swapped between batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import BeamResult, EngineLimits, RequestBatch, SiteDrift
from loka_serve.errors import EngineError
from loka_serve.server import messages
from loka_serve.server.device_memory import MemoryWatch
from loka_serve.server.engine_batches import leaves_are_valid, to_result
from loka_serve.server.engine_worker import EngineWorker, is_device_error
from loka_serve.server.messages import (
    Batch,
    BatchResult,
    CatalogLoaded,
    DeviceMemory,
    Drift,
    DropCatalog,
    LoadCatalog,
    Stop,
    SwapCatalog,
    SwapFinished,
    SwapStarted,
    WireRequest,
    pack_integers,
    unpack_integers,
    unpack_scores,
)
from tests.server.scripted_engine import BROKEN, NAN, RAISE, REFUSED, ScriptedEngine
from tests.server.scripted_server import make_catalog

CATALOG = make_catalog()
LIMITS = EngineLimits(8, 64, 50, 3)
UNFIT = 220  # first code of the newest history item that `SlowDevice.submit` refuses


class Pipe:
    """A worker in a thread, and the API process's ends of its sockets."""

    def __init__(self, engine: ScriptedEngine | None = None, memory: MemoryWatch | None = None) -> None:
        self.context = zmq.Context()
        self.work, work = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        self.results, results = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        for name, (bound, connected) in {"work": (self.work, work), "results": (self.results, results)}.items():
            bound.bind(f"inproc://{name}")
            connected.connect(f"inproc://{name}")
        self.engine = engine or ScriptedEngine(CATALOG, LIMITS)
        worker = EngineWorker(self.engine, CATALOG, work, results, os.getppid(), memory)
        self.thread = threading.Thread(target=worker.run, daemon=True)
        self.thread.start()

    def send(self, message: messages.ToEngine) -> None:
        self.work.send(messages.encode(message))

    def receive(self) -> Any:
        assert self.results.poll(5000), "no answer"
        return messages.decode_from_engine(self.results.recv())

    def ask(self, *requests: WireRequest, version: str = CATALOG.version) -> BatchResult:
        self.send(Batch(7, version, list(requests)))
        result = self.receive()
        assert isinstance(result, BatchResult)
        return result

    def load(self, catalog: Catalog, path: Path) -> None:
        catalog.save(path)
        self.send(LoadCatalog(catalog.version, str(path)))
        assert self.receive() == CatalogLoaded(catalog.version)

    def stop(self) -> None:
        self.send(Stop())
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.stop()


def request(code: int = 1, num_items: int = 3, **changes: Any) -> WireRequest:
    return WireRequest(pack_integers([[code, 0, 0]]), [0, 0], 8, num_items, **changes)


def items_of(result: BatchResult, row: int = 0) -> list[str]:
    return [CATALOG.item_ids[index] for index in unpack_integers(result.results[row].items)]


def test_leaves_become_items_with_scores(pipe: Pipe) -> None:
    result = pipe.ask(request(num_items=6))
    assert result.batch_id == 7
    # item-4 and item-5 share the fifth leaf and so its score.
    assert items_of(result) == [f"item-{index}" for index in range(6)]
    assert unpack_scores(result.results[0].scores).tolist() == [-0.25, -0.5, -0.75, -1.0, -1.25, -1.25]
    assert result.results[0].complete
    assert set(result.timings) == {"prepare", "decode", "total", "expand"}


def test_exclusions_and_predicates_are_compiled_into_the_request(pipe: Pipe) -> None:
    excluded = pack_integers([CATALOG.index_of("item-0") or 0])
    result = pipe.ask(request(exclude=excluded), request(predicates={"kind": ["odd"]}, exclude=excluded))
    assert items_of(result, 0) == ["item-1", "item-2", "item-3"]
    assert items_of(result, 1) == ["item-1", "item-3", "item-5"]


def test_too_few_items_are_said_to_be_incomplete(pipe: Pipe) -> None:
    result = pipe.ask(request(predicates={"price": ["0.5"]}))
    assert (items_of(result), result.results[0].complete) == (["item-1"], False)


def test_a_row_that_is_not_a_number_fails_alone(pipe: Pipe) -> None:
    result = pipe.ask(request(), request(NAN), request())
    assert [row.error for row in result.results] == [None, "nan", None]
    assert items_of(result, 2) == ["item-0", "item-1", "item-2"]


def test_after_an_exception_the_requests_run_one_by_one(pipe: Pipe) -> None:
    result = pipe.ask(request(), request(RAISE), request())
    assert [row.error for row in result.results] == [None, "exception", None]
    assert pipe.engine.batch_sizes == [3, 1, 1, 1]
    assert items_of(result, 2) == ["item-0", "item-1", "item-2"]


def test_catalogs_are_swapped_when_a_batch_names_another(pipe: Pipe, tmp_path: Path) -> None:
    other = make_catalog(30, prefix="new")
    pipe.load(other, tmp_path / "other")
    assert pipe.engine.swaps == []
    live = CATALOG
    for catalog in (CATALOG, other, other, CATALOG):
        pipe.send(Batch(7, catalog.version, [request()]))
        if catalog is not live:  # said before and after
            assert [pipe.receive(), pipe.receive()] == [SwapStarted(catalog.version), SwapFinished(catalog.version)]
            live = catalog
        result = pipe.receive()
        assert catalog.item_ids[unpack_integers(result.results[0].items)[0]] in ("item-0", "new-0")
    assert pipe.engine.swaps == [other.version, CATALOG.version]
    pipe.send(DropCatalog(other.version))
    assert items_of(pipe.ask(request())) == ["item-0", "item-1", "item-2"]


def test_a_swap_by_name_is_done_before_any_batch_needs_it(pipe: Pipe, tmp_path: Path) -> None:
    other = make_catalog(30, prefix="new")
    pipe.load(other, tmp_path / "other")
    pipe.send(SwapCatalog(other.version))
    assert [pipe.receive(), pipe.receive()] == [SwapStarted(other.version), SwapFinished(other.version)]
    assert other.item_ids[unpack_integers(pipe.ask(request(), version=other.version).results[0].items)[0]] == "new-0"
    pipe.send(SwapCatalog(other.version))
    assert pipe.receive() == SwapFinished(other.version)  # is live already: nothing happens
    assert pipe.engine.swaps == [other.version]
    pipe.send(SwapCatalog("unknown"))
    assert pipe.receive() == SwapFinished("unknown", "catalog unknown: expected a version that was loaded")


@pytest.mark.parametrize(
    ("prefix", "reason"),
    [(REFUSED, "catalog: needs 2.0 GiB, but 1.0 GiB are free"), (BROKEN, "unexpected ValueError")],
)
def test_a_swap_that_raises_is_refused_and_the_engine_goes_on(
    pipe: Pipe, tmp_path: Path, prefix: str, reason: str
) -> None:
    bad = make_catalog(30, prefix=prefix)
    pipe.load(bad, tmp_path / "bad")
    pipe.send(SwapCatalog(bad.version))
    assert [pipe.receive(), pipe.receive()] == [SwapStarted(bad.version), SwapFinished(bad.version, reason)]
    assert items_of(pipe.ask(request())) == ["item-0", "item-1", "item-2"]
    # A batch that names it all the same fails as a whole, and alone.
    pipe.send(Batch(8, bad.version, [request(), request()]))
    assert [pipe.receive(), pipe.receive()] == [SwapStarted(bad.version), SwapFinished(bad.version, reason)]
    result = pipe.receive()
    assert (result.batch_id, [row.error for row in result.results]) == (8, ["catalog", "catalog"])
    assert items_of(pipe.ask(request())) == ["item-0", "item-1", "item-2"]
    assert pipe.engine.swaps == []


class SlowDevice(ScriptedEngine):
    """Takes two batches; none is done before a test lets it be, and they must be collected in order."""

    in_flight = 2

    def __init__(self) -> None:
        super().__init__(CATALOG, LIMITS)
        self.log: list[str] = []
        self.on_their_way: list[RequestBatch] = []
        self.may_finish = threading.Event()
        self.second_submitted = threading.Event()
        self.collecting = threading.Event()

    def submit(self, batch: RequestBatch) -> RequestBatch:
        self.log.append(f"submit {len(batch)}")
        if batch.requests[-1].history[-1, 0] == UNFIT:
            raise EngineError("told to take it not")
        self.on_their_way.append(batch)
        if len(self.on_their_way) == 2:
            self.second_submitted.set()
        return batch

    def is_done(self, ticket: RequestBatch) -> bool:
        return self.may_finish.is_set()

    def collect(self, ticket: RequestBatch) -> BeamResult:
        self.collecting.set()
        assert self.may_finish.wait(5)
        assert ticket is self.on_their_way.pop(0), "collected out of order"
        self.log.append(f"collect {len(ticket)}")
        return super().recommend(ticket)

    def recommend(self, batch: RequestBatch) -> BeamResult:
        assert not self.on_their_way, "a batch is on its way"
        return self.collect(self.submit(batch))

    def swap_catalog(self, catalog: Catalog) -> None:
        self.log.append("swap")
        super().swap_catalog(catalog)


def test_the_next_batch_is_submitted_while_one_computes(tmp_path: Path) -> None:
    engine = SlowDevice()
    pipe = Pipe(engine)
    other = make_catalog(30, prefix="new")
    pipe.load(other, tmp_path / "other")
    for size, version in ((1, CATALOG.version), (2, CATALOG.version), (3, CATALOG.version), (4, other.version)):
        pipe.send(Batch(size, version, [request()] * size))
    assert engine.second_submitted.wait(5)
    assert engine.log == ["submit 1", "submit 2"]
    engine.may_finish.set()
    answers = [pipe.receive() for _ in range(6)]
    assert [answer.batch_id for answer in answers if isinstance(answer, BatchResult)] == [1, 2, 3, 4]
    assert answers[3:5] == [SwapStarted(other.version), SwapFinished(other.version)]
    collected = [entry for entry in engine.log if entry.startswith("collect")]
    assert collected == ["collect 1", "collect 2", "collect 3", "collect 4"]
    assert engine.log.index("swap") == engine.log.index("submit 4") - 1 > engine.log.index("collect 3")
    pipe.stop()


@pytest.mark.parametrize(
    ("fault", "collected", "alone"),
    [
        (RAISE, ["collect 2", "collect 4"], ["submit 1", "collect 1", "submit 1", "collect 1"]),
        (UNFIT, ["collect 4"], ["submit 1", "collect 1", "submit 1"]),  # what was not taken is never collected
    ],
)
def test_a_failed_batch_is_tried_again_once_the_others_are_collected(
    fault: int, collected: list[str], alone: list[str]
) -> None:
    engine = SlowDevice()
    pipe = Pipe(engine)
    for codes in ([1, 1, 1], [1, fault], [1, 1, 1, 1]):
        pipe.send(Batch(len(codes), CATALOG.version, [request(code) for code in codes]))
    assert engine.collecting.wait(5)  # the first, to make room for the third
    engine.may_finish.set()
    results = [pipe.receive() for _ in range(3)]
    assert [(result.batch_id, [row.error for row in result.results]) for result in results] == [
        (3, [None] * 3),
        (4, [None] * 4),
        (2, [None, "exception"]),
    ]
    assert engine.log == ["submit 3", "submit 2", "collect 3", "submit 4", *collected, *alone]
    pipe.stop()


class Watched(ScriptedEngine):
    """Has something to say about drift after every batch but those before which a test breaks its guard."""

    drift_sites = ("heads.0",)

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__(CATALOG, LIMITS)
        self.fault = fault

    def judge_drift(self) -> list[SiteDrift] | None:
        if self.fault is not None:
            raise self.fault
        return [SiteDrift("heads.0", 0.25, 1.5, True, True)] if self.batch_sizes[-1] == 1 else None


def test_what_the_drift_guard_finds_comes_after_the_answer() -> None:
    pipe = Pipe(Watched())
    pipe.ask(request())
    assert pipe.receive() == Drift([SiteDrift("heads.0", 0.25, 1.5, True, True)])
    pipe.ask(request(), request())  # nothing to say
    assert items_of(pipe.ask(request())) == ["item-0", "item-1", "item-2"]
    assert isinstance(pipe.receive(), Drift)
    pipe.stop()


def test_a_drift_guard_that_fails_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    pipe = Pipe(Watched(RuntimeError("CUDA out of memory")))
    for _ in range(2):
        assert items_of(pipe.ask(request())) == ["item-0", "item-1", "item-2"]
    pipe.stop()
    assert caplog.text.count("the drift guard failed") == 2


def test_a_catalog_that_cannot_be_read_is_reported(pipe: Pipe, tmp_path: Path) -> None:
    pipe.send(LoadCatalog("some-version", str(tmp_path / "missing")))
    loaded = pipe.receive()
    assert loaded.version == "some-version" and "missing" in loaded.error
    make_catalog(30).save(tmp_path / "other")
    pipe.send(LoadCatalog("another-version", str(tmp_path / "other")))
    assert "expected another-version" in pipe.receive().error


def test_what_makes_leaves_invalid() -> None:
    leaves = np.array([3, 0, 5], np.int32)
    assert leaves_are_valid(leaves, None, CATALOG)
    assert leaves_are_valid(leaves[:0], None, CATALOG)
    assert not leaves_are_valid(np.array([3, -1], np.int32), None, CATALOG)
    assert not leaves_are_valid(np.array([3, CATALOG.trie.leaf_count], np.int32), None, CATALOG)
    assert not leaves_are_valid(np.array([3, 5, 3], np.int32), None, CATALOG)
    without_item_0 = CATALOG.filter([CATALOG.index_of("item-0") or 0])
    assert not leaves_are_valid(leaves, without_item_0, CATALOG)
    assert leaves_are_valid(leaves[::2], without_item_0, CATALOG)


def test_an_infinite_score_is_an_error_even_if_the_engine_does_not_say_so() -> None:
    scores = np.array([[-1.0, np.inf]], np.float32)
    leaves = np.array([[0, 1]], np.int32)
    result = BeamResult(leaves, scores, np.array([2], np.int32), np.array([False]), {})
    assert to_result(result, 0, None, CATALOG, 2).error == "nan"


def test_device_errors_are_told_from_others() -> None:
    class AcceleratorError(RuntimeError):
        """As torch names it."""

    class OutOfMemoryError(RuntimeError):
        """As torch names it."""

    lost: list[Exception] = [
        AcceleratorError("x"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
        ValueError("CUDA driver error (launch.hpp:12): 719 (CUDA_ERROR_LAUNCH_FAILED, unspecified launch failure)"),
    ]
    whole: list[Exception] = [
        RuntimeError("shape mismatch"),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ]
    assert [is_device_error(error) for error in lost] == [True] * len(lost)
    assert [is_device_error(error) for error in whole] == [False] * len(whole)


def test_memory_is_read_at_the_start_after_a_swap_and_now_and_then(tmp_path: Path) -> None:
    readings = iter(range(1, 100))
    pipe = Pipe(memory=MemoryWatch(lambda: DeviceMemory(next(readings), 20, 30), every_seconds=3600.0))
    assert pipe.receive() == DeviceMemory(1, 20, 30)
    pipe.ask(request())
    pipe.ask(request())  # not yet time for another reading
    other = make_catalog(30, "other")
    pipe.load(other, tmp_path / "other.safetensors")
    pipe.send(SwapCatalog(other.version))
    found = [pipe.receive() for _ in range(3)]
    assert found == [SwapStarted(other.version), SwapFinished(other.version), DeviceMemory(2, 20, 30)]
    pipe.stop()


def test_memory_is_read_again_once_it_is_time() -> None:
    readings = iter(range(1, 100))
    watch = MemoryWatch(lambda: DeviceMemory(next(readings), 20, 30), every_seconds=0.0)
    assert [watch.read(), watch.read()] == [DeviceMemory(1, 20, 30), DeviceMemory(2, 20, 30)]
    assert MemoryWatch(lambda: None).read() is None
