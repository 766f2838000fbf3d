"""The JSON of KServe's open inference protocol, version 2, as far as it is spoken here."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Scalar = str | int | float | bool
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
BYTES, FP32, INT32, INT64 = "BYTES", "FP32", "INT32", "INT64"


class InputParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Where an input's data is."""

    binary_data_size: (
        Annotated[Size, Meta(description="Bytes of it behind the JSON, in the order of inputs.")] | None
    ) = None


class InputTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a request; its data is here or, as `binary_data_size` says, behind the JSON."""

    name: Annotated[str, Meta(max_length=64)]
    datatype: Annotated[str, Meta(max_length=64)]
    shape: Annotated[list[Size], Meta(min_length=1, max_length=2)]
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class OutputParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """How an output is wanted."""

    binary_data: bool | None = None


class RequestedOutput(Struct, frozen=True, forbid_unknown_fields=True):
    """An output that is wanted; all are if none is named."""

    name: Annotated[str, Meta(max_length=64)]
    parameters: OutputParameters = OutputParameters()


class InferRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One user to recommend for."""

    inputs: Annotated[list[InputTensor], Meta(min_length=1, max_length=8)]
    id: Annotated[str, Meta(max_length=128)] = ""
    outputs: Annotated[list[RequestedOutput], Meta(max_length=8)] = []
    parameters: Annotated[
        dict[str, Scalar],
        Meta(
            description="num_items, beam_width, exclude_history, timeout_ms and user_id as in RecommendRequest; "
            "features and filter as the text of a JSON object; timeout in microseconds; binary_data_output for outputs "
            "that do not say."
        ),
    ] = {}


class TensorInfo(Struct, frozen=True):
    """What a tensor looks like; -1 is any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Struct, frozen=True):
    """A model's tensors."""

    name: str
    platform: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]


class ServerMetadata(Struct, frozen=True):
    """What serves."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(Struct, frozen=True):
    """The API process lives."""

    live: bool


class ServerReady(Struct, frozen=True):
    """Requests are taken."""

    ready: bool


class ModelReady(Struct, frozen=True):
    """Requests for a model are taken."""

    name: str
    ready: bool


class OutputTensor(Struct, frozen=True, omit_defaults=True):
    """A tensor of an answer; its data is here, or behind the JSON with its size in `parameters`."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[str | int | float] | None = None


class InferResponse(Struct, frozen=True, omit_defaults=True):
    """Recommended items, best first, one row of each output for each."""

    model_name: str
    outputs: list[OutputTensor]
    parameters: Annotated[
        dict[str, Scalar], Meta(description="request_id, catalog_version, complete, and the members of Usage.")
    ]
    id: str = ""
