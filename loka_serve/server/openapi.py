"""The OpenAPI page, generated from the structs that decode the bodies, so that it cannot say anything else."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response

from loka_serve.server import kserve_schemas, schemas
from loka_serve.server.access import OPEN_PATHS
from loka_serve.server.encoding import encode
from loka_serve.server.problems import CONTENT_TYPE, FORBIDDEN, UNAUTHORIZED, Problem, ProblemKind
from loka_serve.server.resolution import ServedModel

DOCUMENT_PATH, VIEWER_PATH = "/openapi.json", "/docs"
REFERENCES = "#/components/schemas/{name}"
STRUCTS = (
    schemas.RecommendRequest,
    schemas.RecommendResponse,
    schemas.ModelList,
    schemas.CatalogInfo,
    schemas.BatchList,
    kserve_schemas.InferRequest,
    kserve_schemas.InferResponse,
    kserve_schemas.ModelMetadata,
    kserve_schemas.ModelReady,
    kserve_schemas.ServerLive,
    kserve_schemas.ServerMetadata,
    kserve_schemas.ServerReady,
    schemas.Health,
    Problem,
)

Responses = dict[int | str, dict[str, Any]]


def reference(name: str) -> dict[str, str]:
    """A schema by name."""
    return {"$ref": REFERENCES.format(name=name)}


def answers(name: str, description: str, *problems: ProblemKind) -> Responses:
    """What a route may answer: 200 with the schema `name`, or one of these problems."""
    responses: Responses = {
        200: {"description": description, "content": {"application/json": {"schema": reference(name)}}}
    }
    for kind in problems:
        responses[kind.status] = _problem(kind)
    return responses


def _problem(kind: ProblemKind) -> dict[str, Any]:
    """The entry of one problem that a route may answer."""
    response: dict[str, Any] = {
        "description": kind.title,
        "content": {CONTENT_TYPE: {"schema": reference("Problem")}},
    }
    if kind.status in (429, 503):
        description = "Seconds after which a new attempt makes sense."
        response["headers"] = {"Retry-After": {"description": description, "schema": {"type": "integer"}}}
    return response


def json_body(name: str, example: dict[str, Any]) -> dict[str, Any]:
    """For a route's `openapi_extra`: a JSON body of the schema `name`."""
    content = {"application/json": {"schema": reference(name), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def install(app: FastAPI, model: ServedModel, max_batch_requests: int, with_keys: bool) -> None:
    """Add the schemas to the page that FastAPI makes of the routes, with this server's limits and keys in them."""
    generate = app.openapi
    document: list[bytes] = []  # of 60 KiB, made once

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            page = generate()
            page.setdefault("components", {}).setdefault("schemas", {}).update(_schemas(model, max_batch_requests))
            if with_keys:
                _add_keys(page)
            app.openapi_schema = page
        return app.openapi_schema

    async def show(request: Request) -> Response:
        if not document:
            document.append(encode(openapi()))
        return Response(document[0], media_type="application/json")

    async def viewer(request: Request) -> Response:
        return get_swagger_ui_html(openapi_url=DOCUMENT_PATH, title=app.title)

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_route(DOCUMENT_PATH, show, include_in_schema=False)
    app.add_route(VIEWER_PATH, viewer, include_in_schema=False)


def _add_keys(page: dict[str, Any]) -> None:
    """Say that each path needs a key, but for those that are open."""
    page["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for path, methods in page["paths"].items():
        if path in OPEN_PATHS:
            continue
        for operation in methods.values():
            operation["security"] = [{"bearer": []}, {"header": []}]
            for kind in (UNAUTHORIZED, FORBIDDEN):
                operation["responses"].setdefault(str(kind.status), _problem(kind))


def _schemas(model: ServedModel, max_batch_requests: int) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(STRUCTS, ref_template=REFERENCES)
    _add_limits(components["RecommendRequest"], model)
    components["RecommendBatchRequest"] = {
        "title": "RecommendBatchRequest",
        "type": "object",
        "description": schemas.RecommendBatchRequest.__doc__,
        "properties": {
            "requests": {
                "type": "array",
                "items": {
                    "anyOf": [
                        reference("RecommendRequest"),
                        {"description": "Anything else is answered with a problem of its own."},
                    ]
                },
                "minItems": 1,
                "maxItems": max_batch_requests,
            }
        },
        "required": ["requests"],
        "additionalProperties": False,
    }
    components["RecommendBatchResponse"] = {
        "title": "RecommendBatchResponse",
        "type": "object",
        "description": "One answer for each request, in their order: a recommendation, or the request's own problem.",
        "properties": {
            "request_id": {"type": "string"},
            "responses": {
                "type": "array",
                "items": {"anyOf": [reference("RecommendResponse"), reference("Problem")]},
            },
        },
        "required": ["request_id", "responses"],
    }
    return components


def _add_limits(request: dict[str, Any], model: ServedModel) -> None:
    """What the struct does not say: the model's limits, and that exactly one kind of history must be given."""
    fields = request["properties"]
    for name in ("num_items", "beam_width"):
        _branch(fields[name], "integer")["maximum"] = model.max_beam_width
    sizes = model.config.codebook_sizes
    _branch(fields["history_sids"], "array")["items"] = {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": size - 1} for size in sizes],
        "minItems": len(sizes),
        "maxItems": len(sizes),
    }
    fields["features"]["propertyNames"] = {"enum": sorted(model.feature_indices)}
    request["oneOf"] = [
        {"required": [given], "properties": {given: {"type": "array"}, other: {"type": "null"}}}
        for given, other in (("history", "history_sids"), ("history_sids", "history"))
    ]


def _branch(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    """The branch of an optional value that is not null."""
    return next(branch for branch in schema["anyOf"] if branch.get("type") == kind)
