"""Tensors of the open inference protocol to a recommend request, and an answer's items to tensors."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from loka_serve.server.bodies import decode_json, field_of, refuse_repeated_keys
from loka_serve.server.encoding import encode
from loka_serve.server.kserve_schemas import (
    BYTES,
    FP32,
    INT32,
    INT64,
    InferRequest,
    InferResponse,
    InputTensor,
    OutputTensor,
    TensorInfo,
)
from loka_serve.server.problems import ProblemError, invalid
from loka_serve.server.schemas import LONGEST_TIMEOUT_MS, RecommendRequest

INTEGERS: dict[str, np.dtype[np.int32] | np.dtype[np.int64]] = {INT32: np.dtype("<i4"), INT64: np.dtype("<i8")}
ITEM_TENSORS, CODE_TENSOR = ("history", "exclude"), "history_sids"
OUTPUTS = {"item_ids": BYTES, "scores": FP32, "semantic_ids": INT32}
BINARY_OUTPUT = "binary_data_output"
AS_THEY_ARE = ("num_items", "beam_width", "exclude_history", "timeout_ms", "user_id")
AS_JSON = ("features", "filter")
MICROSECONDS = "timeout"
LONGEST_MICROSECONDS = 1000 * LONGEST_TIMEOUT_MS
PARAMETERS = (*AS_THEY_ARE, *AS_JSON, MICROSECONDS, BINARY_OUTPUT)

_request_decoder = msgspec.json.Decoder(InferRequest)
_texts_decoder = msgspec.json.Decoder(list[str])
_numbers_decoder = msgspec.json.Decoder(list[int])
_rows_decoder = msgspec.json.Decoder(list[list[int]])
_object_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True)
class Inference:
    """A decoded infer request.

    Attributes:
        outputs: name -> whether as binary data, in the order of the answer.
    """

    request: RecommendRequest
    id: str
    outputs: dict[str, bool]


def input_tensors(levels: int) -> list[TensorInfo]:
    """What a model takes: exactly one of the two histories, and items to leave out if wanted."""
    return [
        TensorInfo("history", BYTES, [-1]),
        TensorInfo(CODE_TENSOR, INT32, [-1, levels]),
        TensorInfo("exclude", BYTES, [-1]),
    ]


def output_tensors(levels: int) -> list[TensorInfo]:
    """What a model gives."""
    return [
        TensorInfo(name, datatype, [-1, levels] if name == "semantic_ids" else [-1])
        for name, datatype in OUTPUTS.items()
    ]


def decode_inference(body: bytes, json_size: str | None, levels: int) -> Inference:
    """An infer request.

    Args:
        json_size: the header Inference-Header-Content-Length; None if the body is JSON to its end.
        levels: the model's.

    Raises:
        ProblemError: 422 naming the field.
    """
    size = len(body)
    if json_size is not None:
        if not json_size.isascii() or not json_size.isdecimal() or len(json_size) > 18 or int(json_size) > size:
            raise invalid("Inference-Header-Content-Length", "expected the length of the JSON at the body's begin")
        size = int(json_size)
    message = decode_json(_request_decoder, body[:size])
    refuse_repeated_keys(body[:size], 0)
    members, is_binary = _members_of(message.parameters)
    members |= _read_inputs(message.inputs, body[size:], levels)
    try:
        request = msgspec.convert(members, RecommendRequest)
    except msgspec.ValidationError as error:
        field, text = field_of(str(error))
        place = "inputs" if field.partition("[")[0] in (*ITEM_TENSORS, CODE_TENSOR) else "parameters"
        raise invalid(f"{place}.{field}", text) from None
    return Inference(request, message.id, _outputs_of(message, is_binary))


def _members_of(parameters: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Members of a RecommendRequest that are parameters here, and whether outputs are binary unless they say."""
    members: dict[str, Any] = {}
    for name, value in parameters.items():
        if name in AS_THEY_ARE:
            members[name] = value
        elif name in AS_JSON:
            members[name] = _object_of(name, value)
        elif name == MICROSECONDS:
            if type(value) is not int or not 0 <= value <= LONGEST_MICROSECONDS:
                raise invalid(
                    "parameters.timeout", f"expected microseconds as a whole number from 0 to {LONGEST_MICROSECONDS}"
                )
            if value:  # 0 is the server's default
                members.setdefault("timeout_ms", max(1.0, value / 1000))
        elif name != BINARY_OUTPUT:
            raise invalid(f"parameters.{name[:100]}", f"unknown parameter; known parameters: {', '.join(PARAMETERS)}")
    binary = parameters.get(BINARY_OUTPUT, False)
    if not isinstance(binary, bool):
        raise invalid(f"parameters.{BINARY_OUTPUT}", "expected true or false")
    return members, binary


def _object_of(name: str, value: Any) -> dict[str, Any]:
    where = f"parameters.{name}"
    if not isinstance(value, str):
        raise invalid(where, "expected the text of a JSON object")
    text = value.encode("utf-8", "surrogatepass")
    try:
        found = decode_json(_object_decoder, text)
        refuse_repeated_keys(text, 0)
    except ProblemError as error:
        raise invalid(where, f"expected the text of a JSON object: {error.detail}") from None
    return found


def _read_inputs(tensors: list[InputTensor], binary: bytes, levels: int) -> dict[str, Any]:
    """name -> rows; each input's binary data follows that of the one before."""
    members: dict[str, Any] = {}
    begin = 0
    for index, tensor in enumerate(tensors):
        where = f"inputs[{index}]"
        if tensor.name in members:
            raise invalid(where, "expected each input once")
        length = tensor.parameters.binary_data_size
        if (length is None) == (tensor.data is msgspec.UNSET):
            raise invalid(where, "expected either data or parameters.binary_data_size")
        if length is not None and begin + length > len(binary):
            raise invalid(
                f"{where}.parameters.binary_data_size", f"expected at most {len(binary) - begin}, got {length}"
            )
        data = None if length is None else binary[begin : begin + length]
        begin += length or 0
        members[tensor.name] = _read_tensor(tensor, where, data, levels)
    if begin != len(binary):
        raise invalid("inputs", f"expected {begin} bytes of binary data behind the JSON, got {len(binary)}")
    return members


def _read_tensor(tensor: InputTensor, where: str, binary: bytes | None, levels: int) -> list[Any]:
    if tensor.name in ITEM_TENSORS:
        if tensor.datatype != BYTES or len(tensor.shape) != 1:
            raise invalid(where, f"expected BYTES of the shape [items], got {tensor.datatype[:20]} of {tensor.shape}")
        rows = _decode_data(_texts_decoder, tensor, where) if binary is None else _split_texts(binary, where)
        if len(rows) != tensor.shape[0]:
            raise invalid(where, f"expected {tensor.shape[0]} texts as the shape says, got {len(rows)}")
        return rows
    if tensor.name != CODE_TENSOR:
        raise invalid(f"{where}.name", f"unknown input; known inputs: {', '.join((*ITEM_TENSORS, CODE_TENSOR))}")
    if tensor.datatype not in INTEGERS or len(tensor.shape) != 2 or tensor.shape[1] != levels:
        got = f"{tensor.datatype[:20]} of {tensor.shape}"
        raise invalid(where, f"expected INT32 or INT64 of the shape [items, {levels}], got {got}")
    return _codes(tensor, where, binary)


def _decode_data(decoder: msgspec.json.Decoder[list[Any]], tensor: InputTensor, where: str) -> list[Any]:
    try:
        assert isinstance(tensor.data, msgspec.Raw)
        return decode_json(decoder, tensor.data)
    except ProblemError as error:
        ((field, message),) = [(found.field, found.message) for found in error.errors]
        raise invalid(f"{where}.data{field if field.startswith('[') else ''}", message) from None


def _split_texts(data: bytes, where: str) -> list[str]:
    """Texts that each follow their own length, 4 bytes little-endian."""
    rows = []
    position, end = 0, len(data)
    try:
        while position < end:
            (length,) = struct.unpack_from("<I", data, position)
            position += 4 + length
            if position > end:
                raise invalid(where, "a text goes beyond the end of the binary data")
            rows.append(data[position - length : position].decode())
    except struct.error:
        raise invalid(where, "the binary data ends within a length") from None
    except UnicodeError:
        raise invalid(f"{where}[{len(rows)}]", "expected UTF-8 text") from None
    return rows


def _codes(tensor: InputTensor, where: str, binary: bytes | None) -> list[Any]:
    items, levels = tensor.shape
    if binary is not None:
        kind = INTEGERS[tensor.datatype]
        if len(binary) != items * levels * kind.itemsize:
            expected = f"expected {items * levels * kind.itemsize} bytes as the shape says, got {len(binary)}"
            raise invalid(where, expected)
        return list(np.frombuffer(binary, dtype=kind).reshape(items, levels).tolist())
    assert isinstance(tensor.data, msgspec.Raw)
    if bytes(memoryview(tensor.data)[1:]).lstrip().startswith(b"["):
        rows = _decode_data(_rows_decoder, tensor, where)
        if len(rows) != items or any(len(row) != levels for row in rows):
            raise invalid(where, f"expected {items} rows of {levels} as the shape says")
        return rows
    numbers = _decode_data(_numbers_decoder, tensor, where)
    if len(numbers) != items * levels:
        raise invalid(where, f"expected {items * levels} numbers as the shape says, got {len(numbers)}")
    return [numbers[begin : begin + levels] for begin in range(0, len(numbers), levels)]


def _outputs_of(message: InferRequest, is_binary: bool) -> dict[str, bool]:
    if not message.outputs:
        return dict.fromkeys(OUTPUTS, is_binary)
    outputs = {}
    for index, output in enumerate(message.outputs):
        if output.name not in OUTPUTS or output.name in outputs:
            raise invalid(f"outputs[{index}].name", f"expected each once of {', '.join(OUTPUTS)}")
        binary = output.parameters.binary_data
        outputs[output.name] = is_binary if binary is None else binary
    return outputs


def encode_answer(answer: dict[str, Any], inference: Inference, levels: int) -> tuple[bytes, int | None]:
    """(body, length of the JSON at its begin; None if it is JSON to its end)."""
    items = answer["items"]
    columns = {"item_ids": "item_id", "scores": "score", "semantic_ids": "semantic_id"}
    outputs, parts = [], []
    for name, binary in inference.outputs.items():
        rows = [item[columns[name]] for item in items]
        shape = [len(rows), levels] if name == "semantic_ids" else [len(rows)]
        if not binary:
            flat = [code for row in rows for code in row] if name == "semantic_ids" else rows
            outputs.append(OutputTensor(name, OUTPUTS[name], shape, data=flat))
            continue
        part = _pack(name, rows)
        parts.append(part)
        outputs.append(OutputTensor(name, OUTPUTS[name], shape, {"binary_data_size": len(part)}))
    about = {name: answer[name] for name in ("request_id", "catalog_version", "complete")}
    head = encode(InferResponse(answer["model"], outputs, {**about, **answer["usage"]}, inference.id))
    return b"".join([head, *parts]), len(head) if parts else None


def _pack(name: str, rows: list[Any]) -> bytes:
    if name == "item_ids":
        texts = [row.encode() for row in rows]
        return b"".join(part for text in texts for part in (struct.pack("<I", len(text)), text))
    return np.array(rows, "<f4" if name == "scores" else "<i4").tobytes()
