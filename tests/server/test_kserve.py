"""The open inference protocol as NVIDIA's own client speaks it, and what is wrong with a request by its field."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

from loka_serve.server.kserve_tensors import decode_inference
from loka_serve.server.problems import ProblemError
from tests.server.processes import RunningServer
from tests.server.scripted_engine import NAN, SLOW, command
from tests.server.test_http import CATALOG, problem_of

MODEL = "scripted"


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> Iterator[InferenceServerClient]:
    client = InferenceServerClient(scripted.url.removeprefix("http://"))
    yield client
    client.close()


def texts(name: str, values: list[str], binary: bool = True) -> InferInput:
    tensor = InferInput(name, [len(values)], "BYTES")
    return tensor.set_data_from_numpy(np.array(values, dtype=np.object_), binary_data=binary)


def codes(rows: list[list[int]], datatype: str = "INT32", binary: bool = True) -> InferInput:
    values = np.array(rows, np.int32 if datatype == "INT32" else np.int64).reshape(len(rows), 3)
    return InferInput("history_sids", list(values.shape), datatype).set_data_from_numpy(values, binary_data=binary)


def answer_of(result: InferResult) -> tuple[list[str], list[float], list[list[int]]]:
    items = [item.decode() if isinstance(item, bytes) else item for item in result.as_numpy("item_ids").tolist()]
    assert result.as_numpy("scores").dtype == np.float32 and result.as_numpy("semantic_ids").dtype == np.int32
    return items, result.as_numpy("scores").tolist(), result.as_numpy("semantic_ids").tolist()


def test_metadata_and_health(client: InferenceServerClient, scripted: RunningServer) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert not client.is_model_ready("another")
    metadata = client.get_server_metadata()
    assert (metadata["name"], metadata["extensions"]) == ("loka-serve", ["binary_tensor_data"])
    assert client.get_model_metadata(MODEL) == {
        "name": MODEL, "platform": "loka_serve",
        "inputs": [
            {"name": "history", "datatype": "BYTES", "shape": [-1]},
            {"name": "history_sids", "datatype": "INT32", "shape": [-1, 3]},
            {"name": "exclude", "datatype": "BYTES", "shape": [-1]},
        ],
        "outputs": [
            {"name": "item_ids", "datatype": "BYTES", "shape": [-1]},
            {"name": "scores", "datatype": "FP32", "shape": [-1]},
            {"name": "semantic_ids", "datatype": "INT32", "shape": [-1, 3]},
        ],
    }  # fmt: skip
    with pytest.raises(InferenceServerException, match="expected the model scripted"):
        client.get_model_metadata("another")


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_the_answer_is_that_of_the_recommend_route(
    client: InferenceServerClient, scripted: RunningServer, binary: bool
) -> None:
    """With the binary extension, which is the client's default both ways, and without it."""
    wanted = scripted.recommend(
        history=["item-9", "ünknown"], exclude=["item-0"], num_items=4, beam_width=8, filter={"kind": ["even"]},
        features={"age": "old"},
    ).json()  # fmt: skip
    parameters = {
        "num_items": 4, "beam_width": 8, "user_id": "u", "filter": '{"kind": ["even"]}', "features": '{"age": "old"}',
    }  # fmt: skip
    outputs = None if binary else [InferRequestedOutput(name, False) for name in ("item_ids", "scores", "semantic_ids")]
    result = client.infer(
        MODEL, [texts("history", ["item-9", "ünknown"], binary), texts("exclude", ["item-0"], binary)],
        request_id="mine", parameters=parameters, outputs=outputs,
    )  # fmt: skip
    items = wanted["items"]
    assert len(items) == 4
    assert answer_of(result) == (
        [item["item_id"] for item in items],
        [item["score"] for item in items],
        [item["semantic_id"] for item in items],
    )
    response = result.get_response()
    assert (response["model_name"], response["id"]) == (MODEL, "mine")
    given = response["parameters"]
    assert (given["history_length"], given["unknown_items"], given["beam_width"]) == (1, 1, 8)
    assert (given["catalog_version"], given["complete"]) == (CATALOG.version, True)


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_semantic_ids_in_and_chosen_outputs_out(
    scripted: RunningServer, client: InferenceServerClient, datatype: str, binary: bool
) -> None:
    outputs = [InferRequestedOutput("scores"), InferRequestedOutput("item_ids", binary_data=False)]
    tensor = codes([[1, 1, 1], [2, 2, 2]], datatype, binary)
    result = client.infer(MODEL, [tensor], outputs=outputs, parameters={"num_items": 2})
    expected = [scripted.expected_score(CATALOG.semantic_id(leaf), leaf, 2) for leaf in (0, 1)]
    assert result.as_numpy("scores").tolist() == expected
    assert [output["name"] for output in result.get_response()["outputs"]] == ["scores", "item_ids"]
    assert result.as_numpy("semantic_ids") is None
    assert result.as_numpy("item_ids").tolist() == ["item-0", "item-1"]


def test_empty_tensors(scripted: RunningServer, client: InferenceServerClient) -> None:
    for history in (texts("history", []), codes([])):
        items, scores, rows = answer_of(client.infer(MODEL, [history], parameters={"num_items": 1}))
        assert (len(items), len(rows)) == (1, 1) and scores == [scripted.expected_score(CATALOG.semantic_id(0), 0, 0)]
    nothing = client.infer(MODEL, [texts("history", [])], parameters={"filter": '{"kind": ["none"]}'})
    assert answer_of(nothing) == ([], [], [])
    assert nothing.as_numpy("semantic_ids").shape == (0, 3)


def test_errors_reach_the_client_with_their_status(client: InferenceServerClient, scripted: RunningServer) -> None:
    def error(status: str, *inputs: InferInput, **parameters: Any) -> str:
        with pytest.raises(InferenceServerException) as caught:
            client.infer(MODEL, list(inputs), parameters=parameters)
        assert caught.value.status() == status
        return str(caught.value.message())

    assert error("422", texts("history", ["a", ""])) == "inputs.history[1]: expected `str` of length >= 1"
    assert error("422", texts("exclude", [])).startswith("history: expected history or history_sids")
    assert error("422", texts("history", []), num_items=1000).startswith("num_items: expected 1 to 64, got 1000")
    assert error("500", codes(command(NAN))) == "the model's scores for this request are not numbers"
    assert error("504", codes(command(SLOW)), timeout_ms=20).startswith("the deadline passed")
    with pytest.raises(InferenceServerException, match="the deadline passed"):
        client.infer(MODEL, [codes(command(SLOW))], timeout=20_000)
    with pytest.raises(InferenceServerException, match="expected identity"):
        client.infer(MODEL, [texts("history", [])], request_compression_algorithm="gzip")
    with pytest.raises(InferenceServerException, match="larger than 20000 bytes"):
        client.infer(MODEL, [texts("history", ["x" * 500] * 60)])
    problem = problem_of(scripted.client.post(f"/v2/models/{MODEL}/infer", content=b"{"), 422)
    assert problem["error"] == problem["detail"] == "body: expected JSON: input data was truncated"
    assert "error" not in problem_of(scripted.client.post("/v1/recommend", content=b"{"), 422)
    route = 'route="/v2/models/{name}/infer"'
    assert scripted.metric(f'loka_requests_total{{outcome="failed",{route}}}') >= 1
    problem_of(scripted.client.get(f"/v2/models/{MODEL}/infer"), 405)


def tensor(**members: Any) -> dict[str, Any]:
    return {"name": "history", "datatype": "BYTES", "shape": [1], "data": ["a"]} | members


def sids(**members: Any) -> dict[str, Any]:
    return {"name": "history_sids", "datatype": "INT32", "shape": [1, 3], "data": [1, 2, 3]} | members


def binary(size: int, shape: int = 1) -> dict[str, Any]:
    return {"name": "history", "datatype": "BYTES", "shape": [shape], "parameters": {"binary_data_size": size}}


def decode(message: Any, behind: bytes = b"", size: str | None = None) -> Any:
    head = message if isinstance(message, bytes) else json.dumps(message).encode()
    return decode_inference(head + behind, size or (str(len(head)) if behind else None), 3)


@pytest.mark.parametrize(
    ("message", "behind", "detail"),
    [
        ({}, b"", "body: object missing required field `inputs`"),
        ({"inputs": []}, b"", "inputs: expected `array` of length >= 1"),
        ({"inputs": [tensor()], "x": 1}, b"", "x: unknown field"),
        ({"inputs": [tensor(shape=[-1])]}, b"", "inputs[0].shape[0]: expected `int` >= 0"),
        ({"inputs": [tensor(shape=[1, 1])]}, b"",
         "inputs[0]: expected BYTES of the shape [items], got BYTES of [1, 1]"),
        ({"inputs": [tensor(datatype="FP32")]}, b"", "inputs[0]: expected BYTES of the shape [items], got FP32 of [1]"),
        ({"inputs": [tensor(shape=[2])]}, b"", "inputs[0]: expected 2 texts as the shape says, got 1"),
        ({"inputs": [tensor(data=[7])]}, b"", "inputs[0].data[0]: expected `str`, got `int`"),
        ({"inputs": [tensor(data="a")]}, b"", "inputs[0].data: expected `array`, got `str`"),
        ({"inputs": [tensor(data=["x" * 600])]}, b"", "inputs.history[0]: expected `str` of length <= 512"),
        ({"inputs": [tensor(name="image")]}, b"",
         "inputs[0].name: unknown input; known inputs: history, exclude, history_sids"),
        ({"inputs": [tensor(), tensor()]}, b"", "inputs[1]: expected each input once"),
        ({"inputs": [{"name": "history", "datatype": "BYTES", "shape": [0]}]}, b"",
         "inputs[0]: expected either data or parameters.binary_data_size"),
        ({"inputs": [binary(1) | {"data": []}]}, b"a",
         "inputs[0]: expected either data or parameters.binary_data_size"),
        ({"inputs": [binary(9)]}, b"\1\0\0\0a", "inputs[0].parameters.binary_data_size: expected at most 5, got 9"),
        ({"inputs": [binary(4)]}, b"\0\0\0\0a", "inputs: expected 4 bytes of binary data behind the JSON, got 5"),
        ({"inputs": [binary(3)]}, b"\1\0\0", "inputs[0]: the binary data ends within a length"),
        ({"inputs": [binary(5)]}, b"\2\0\0\0a", "inputs[0]: a text goes beyond the end of the binary data"),
        ({"inputs": [binary(5)]}, b"\1\0\0\0\xff", "inputs[0][0]: expected UTF-8 text"),
        ({"inputs": [binary(5, 2**31 - 1)]}, b"\1\0\0\0a",
         "inputs[0]: expected 2147483647 texts as the shape says, got 1"),
        ({"inputs": [sids(shape=[1, 2], data=[1, 2])]}, b"",
         "inputs[0]: expected INT32 or INT64 of the shape [items, 3], got INT32 of [1, 2]"),
        ({"inputs": [sids(shape=[0, 0], data=[])]}, b"",
         "inputs[0]: expected INT32 or INT64 of the shape [items, 3], got INT32 of [0, 0]"),
        ({"inputs": [sids(data=[1, 2])]}, b"", "inputs[0]: expected 3 numbers as the shape says, got 2"),
        ({"inputs": [sids(data=[[1, 2], [3]])]}, b"", "inputs[0]: expected 1 rows of 3 as the shape says"),
        ({"inputs": [sids(data=[1, 2, -3])]}, b"", "inputs.history_sids[0][2]: expected `int` >= 0"),
        ({"inputs": [sids(data=[1, 2, 2.5])]}, b"", "inputs[0].data[2]: expected `int`, got `float`"),
        ({"inputs": [tensor()], "outputs": [{"name": "logits"}]}, b"",
         "outputs[0].name: expected each once of item_ids, scores, semantic_ids"),
        ({"inputs": [tensor()], "parameters": {"top_k": 3}}, b"", "parameters.top_k: unknown parameter; known"),
        ({"inputs": [tensor()], "parameters": {"num_items": "3"}}, b"",
         "parameters.num_items: expected `int | null`, got `str`"),
        ({"inputs": [tensor()], "parameters": {"timeout": -1}}, b"", "parameters.timeout: expected microseconds"),
        ({"inputs": [tensor()], "parameters": {"timeout": 10**400}}, b"",
         "parameters.timeout: expected microseconds as a whole number from 0 to 600000000"),
        ({"inputs": [tensor()], "parameters": {"binary_data_output": 1}}, b"",
         "parameters.binary_data_output: expected true or false"),
        ({"inputs": [tensor()], "parameters": {"filter": 3}}, b"",
         "parameters.filter: expected the text of a JSON object"),
        ({"inputs": [tensor()], "parameters": {"filter": "{"}}, b"",
         "parameters.filter: expected the text of a JSON object: body: expected JSON"),
        ({"inputs": [tensor()], "parameters": {"filter": '{"a":["x"],"a":["y"]}'}}, b"",
         "parameters.filter: expected the text of a JSON object: body: expected each key once, got `a` again"),
        ({"inputs": [tensor()], "parameters": {"filter": '{"a":1}'}}, b"",
         "parameters.filter[...]: expected `array`, got `int`"),
        (b'{"id":"a","id":"b","inputs":[{"name":"history","datatype":"BYTES","shape":[0],"data":[]}]}', b"",
         "body: expected each key once, got `id` again"),
        (b'{"inputs":[{"name":"history","datatype":"BYTES","shape":[0],"data":[]}],"parameters":{"a":NaN}}', b"",
         "body: expected JSON: JSON is malformed"),
        (b'{"inputs":[{"name":"history","datatype":"BYTES","shape":[1],"data":%s}]}' % (b"[" * 90_000 + b"]" * 90_000),
         b"", "body: nested too deeply"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(message: Any, behind: bytes, detail: str) -> None:
    with pytest.raises(ProblemError) as caught:
        decode(message, behind)
    assert caught.value.kind.status == 422
    assert caught.value.detail.startswith(detail)


@pytest.mark.parametrize("size", ["-1", "1e3", "٣", "99999", "", " 5", "9" * 5000])
def test_a_length_of_the_json_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(ProblemError, match="Inference-Header-Content-Length: expected the length"):
        decode_inference(b'{"inputs": []}', size, 3)


def test_nested_data_and_binary_texts_are_read() -> None:
    message = {"inputs": [sids(shape=[2, 3], data=[[1, 2, 3], [4, 5, 6]])], "parameters": {"timeout": 0}}
    request = decode(message).request
    assert (request.history_sids, request.timeout_ms) == ([[1, 2, 3], [4, 5, 6]], None)
    names = ["a", "", "ü:"]
    data = b"".join(struct.pack("<I", len(name.encode())) + name.encode() for name in names if name)
    assert decode({"inputs": [binary(len(data), 2)]}, data).request.history == ["a", "ü:"]
