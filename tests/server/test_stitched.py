"""The server before the tensorrt engine's stitched executor on the CPU.

A small part of what LOKA_TEST_ENGINE=tensorrt runs of these tests, and a bundle that was built for that engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loka_serve.build import main as build
from loka_serve.bundle import Bundle
from loka_serve.catalog.histories import read_histories
from loka_serve.decoding.expansion import expand
from loka_serve.engines import load_engine
from loka_serve.engines.base import EngineLimits, RequestBatch
from loka_serve.probe.histories import to_request
from tests.building import build_arguments
from tests.server import test_http
from tests.server.processes import RunningServer, running, scripted_command
from tests.server.scripted_engine import NAN


@pytest.fixture(scope="module")
def scripted(catalog_file: Path) -> Iterator[RunningServer]:
    """As the fixture that others use, but every ranking is computed."""
    flags = ("--max-batch", "16", "--max-delay-ms", "30", "--max-body-bytes", "20000", "--max-batch-requests", "20")
    with running(scripted_command(catalog_file, *flags, "--allow-catalog-updates", stitched=True)) as server:
        yield server


def test_answers_and_filters_and_one_bad_request(scripted: RunningServer) -> None:
    test_http.test_answer(scripted)
    test_http.test_filters_and_exclusions(scripted)
    test_http.test_fewer_items_than_asked_for_are_said_to_be_incomplete(scripted)
    test_http.test_a_malformed_element_of_a_batch_fails_alone(scripted)
    detail = "the model's scores for this request are not numbers"
    test_http.test_one_bad_request_among_16_fails_alone(scripted, NAN, "nan", detail)


def test_a_bundle_is_served_by_the_engine_that_it_was_built_for(tmp_path: Path) -> None:
    assert build(build_arguments(tmp_path, "--engine", "tensorrt", "--recipe", "fp8_tensor", "--quiet")) == 0
    bundle = Bundle.load(tmp_path / "bundle")
    command = [sys.executable, "-m", "loka_serve.serve", "--bundle", str(bundle.path), "--port", "0"]
    user = next(user for user in read_histories(tmp_path / "histories.jsonl") if len(user.items) > 2)
    with running(command) as server:
        (model,) = server.client.get("/v1/models").json()["models"]
        answer = server.recommend(history=user.items, features=user.features, num_items=5, beam_width=16).json()
    assert (model["engine"], model["device"]) == ("tensorrt", "cpu")
    config = bundle.config
    limits = EngineLimits(1, 16, config.max_context, config.levels)
    engine = load_engine(bundle, "tensorrt", "cpu", limits)
    result = engine.recommend(RequestBatch((to_request(user, bundle.catalog, config, 16),)))
    wanted = expand(result.leaves[0], result.scores[0], bundle.catalog, None, 5)
    assert [item["item_id"] for item in answer["items"]] == [bundle.catalog.item_ids[one.item_index] for one in wanted]
    assert [item["score"] for item in answer["items"]] == pytest.approx([one.score for one in wanted], abs=1e-4)
