"""schemathesis against a running server: whatever is sent, no 500, and each answer is as the OpenAPI page says."""

from __future__ import annotations

import re

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tests.server.processes import RunningServer

# What an answer must be, whether the request was good or bad. (That a bad request gets an error is for test_bodies.py:
# schemathesis counts an element of a batch that fails alone, under a 200, as accepted.)
CHECKS = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)
# For each operation; an uploaded catalog starts a process to compile it.
EXAMPLES = {
    ("PUT", "/v1/catalog"): 4,
    ("POST", "/v1/recommend"): 50,
    ("POST", "/v1/recommend/batch"): 30,
    ("POST", "/v2/models/{name}/infer"): 40,
}
FEW = 3


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["good", "bad"])
def test_no_request_breaks_the_server(scripted: RunningServer, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{scripted.url}/openapi.json")
    operations = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        operations[operation.method.upper(), operation.path] = operation
    assert set(EXAMPLES) < set(operations)
    sent = 0

    def send(case: schemathesis.Case) -> None:
        nonlocal sent
        sent += 1
        response = case.call(base_url=scripted.url, timeout=20)
        # 504 is the right answer to a timeout_ms that no engine can keep.
        assert response.status_code < 500 or response.status_code == 504, response.text
        assert not re.search(r"Traceback|File \"|\.py\b|/tmp/|/usr/|site-packages", response.text)
        case.validate_response(response, checks=list(CHECKS))

    for name, operation in operations.items():
        if mode is GenerationMode.NEGATIVE and not name[1].startswith(("/v1/recommend", "/v2/models")):
            continue  # nothing in them could be bad
        limits = settings(
            max_examples=EXAMPLES.get(name, FEW),
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        limits(given(case=operation.as_strategy(generation_mode=mode))(send))()
    assert sent >= 120
    assert scripted.metric("loka_engine_restarts_total") == 0
    assert scripted.recommend(history=[], num_items=3).status_code == 200
    assert "Traceback" not in scripted.log
