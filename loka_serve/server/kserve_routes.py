"""KServe's open inference protocol, version 2, beside the routes of our own: for clients that speak it already."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from loka_serve import __version__
from loka_serve.server import kserve_schemas, openapi, problems
from loka_serve.server.encoding import json_response
from loka_serve.server.kserve_tensors import (
    Inference,
    decode_inference,
    encode_answer,
    input_tensors,
    output_tensors,
)
from loka_serve.server.problems import NOT_FOUND, ProblemError, ProblemKind
from loka_serve.server.recommend import OUTCOMES, RecommendRoutes
from loka_serve.server.schemas import RecommendRequest
from loka_serve.server.state import ServerState

MODEL_PATH = "/v2/models/{name}"
INFER_PATH = f"{MODEL_PATH}/infer"
JSON_SIZE_HEADER = "Inference-Header-Content-Length"
PLATFORM = "loka_serve"
BINARY = {"schema": {"type": "string", "format": "binary"}}
EXAMPLE = {
    "inputs": [{"name": "history", "datatype": "BYTES", "shape": [2], "data": ["item-1", "item-2"]}],
    "parameters": {"num_items": 10},
}


class KServeRoutes:
    """Handlers that share one server's state, and recommend as the other routes do."""

    def __init__(self, state: ServerState, routes: RecommendRoutes) -> None:
        self.state = state
        self.routes = routes
        self.levels = state.model.config.levels
        state.metrics.expect(INFER_PATH, OUTCOMES)

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""

        def add(path: str, handler: Any, summary: str, name: str, *kinds: ProblemKind) -> None:
            extra = {"parameters": [self._name_parameter()]} if "{name}" in path else {}
            app.add_api_route(
                path, handler, methods=["GET"], summary=summary, tags=["open inference protocol"],
                responses=openapi.answers(name, summary, *kinds), openapi_extra=extra,
            )  # fmt: skip

        add("/v2", self.server, "Name, version and extensions", "ServerMetadata")
        add("/v2/health/live", self.live, "Whether the API process lives", "ServerLive")
        add("/v2/health/ready", self.ready, "Whether requests are taken", "ServerReady", problems.UNAVAILABLE)
        add(MODEL_PATH, self.model, "A model's tensors", "ModelMetadata", NOT_FOUND)
        add(
            f"{MODEL_PATH}/ready", self.model_ready, "Whether a model takes requests", "ModelReady", NOT_FOUND,
            problems.UNAVAILABLE,
        )  # fmt: skip
        body = openapi.json_body("InferRequest", EXAMPLE)
        responses = openapi.answers(
            "InferResponse", "Items, best first.", NOT_FOUND, *problems.OF_RECOMMENDATIONS, problems.DEADLINE
        )
        for content in (body["requestBody"]["content"], responses[200]["content"]):
            content["application/octet-stream"] = BINARY
        app.add_api_route(
            INFER_PATH,
            self.infer,
            methods=["POST"],
            summary="Recommend items for one history",
            description="Tensors in JSON, or as binary data behind it with its length in the header "
            f"`{JSON_SIZE_HEADER}`. One user a request; requests that come together are computed together.",
            tags=["open inference protocol"],
            responses=responses,
            openapi_extra={"parameters": [self._name_parameter()], **body},
        )

    async def server(self, request: Request) -> Response:
        """What serves."""
        return json_response(kserve_schemas.ServerMetadata("loka-serve", __version__, ["binary_tensor_data"]))

    async def live(self, request: Request) -> Response:
        """It does."""
        return json_response(kserve_schemas.ServerLive(True))

    async def ready(self, request: Request) -> Response:
        """200, or 503 with the reason."""
        self.state.require_ready()
        return json_response(kserve_schemas.ServerReady(True))

    async def model(self, request: Request) -> Response:
        """The tensors."""
        name = self._known_name(request)
        inputs, outputs = input_tensors(self.levels), output_tensors(self.levels)
        return json_response(kserve_schemas.ModelMetadata(name, PLATFORM, inputs, outputs))

    async def model_ready(self, request: Request) -> Response:
        """200, or 503 with the reason."""
        name = self._known_name(request)
        self.state.require_ready()
        return json_response(kserve_schemas.ModelReady(name, True))

    async def infer(self, request: Request) -> Response:
        """One request, one answer."""
        self._known_name(request)
        inference: Inference | None = None

        def decode(body: bytes | msgspec.Raw) -> RecommendRequest:
            nonlocal inference
            inference = decode_inference(bytes(body), request.headers.get(JSON_SIZE_HEADER), self.levels)
            return inference.request

        def respond(answer: dict[str, Any]) -> Response:
            assert inference is not None
            body, json_size = encode_answer(answer, inference, self.levels)
            if json_size is None:
                return Response(body, media_type="application/json")
            return Response(body, headers={JSON_SIZE_HEADER: str(json_size)}, media_type="application/octet-stream")

        return await self.routes.answer_one(request, INFER_PATH, decode, respond)

    def _known_name(self, request: Request) -> str:
        name = self.state.model.name
        if request.path_params["name"] != name:
            raise ProblemError(NOT_FOUND, f"expected the model {name}")
        return name

    def _name_parameter(self) -> dict[str, Any]:
        return {
            "name": "name",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "enum": [self.state.model.name]},
        }
