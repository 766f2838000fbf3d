"""The HTTP application: routes, error answers, and what starts and stops with the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loka_serve import __version__
from loka_serve.server import openapi, problems, schemas
from loka_serve.server.catalog_routes import CatalogRoutes
from loka_serve.server.catalog_watch import CatalogWatcher
from loka_serve.server.debug_routes import add_debug_routes
from loka_serve.server.encoding import json_response
from loka_serve.server.engine_client import STOP_SECONDS
from loka_serve.server.kserve_routes import KServeRoutes
from loka_serve.server.middleware import Envelope, context_of, problem_response
from loka_serve.server.problems import ProblemError, ProblemKind
from loka_serve.server.recommend import BATCH_PATH, RECOMMEND_PATH, RecommendRoutes
from loka_serve.server.state import ServerState
from loka_serve.server.summary import log_summaries

DESCRIPTION = """Recommends items by generating semantic IDs with constrained beam search.

Every error is an RFC 9457 problem (`application/problem+json`) with the request's id, which is also in the header
`X-Request-ID`: send your own or get a new one. 422 names the field that is wrong."""


def create_app(state: ServerState) -> FastAPI:
    """The application of one server; its lifespan starts and stops the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(state.engine.run())]
        if state.config.summary_interval_s:
            summaries = log_summaries(state.window, lambda: state.batcher.queue_depth, state.config.summary_interval_s)
            tasks.append(asyncio.create_task(summaries))
        if state.config.watch_catalog is not None:
            tasks.append(asyncio.create_task(CatalogWatcher(state, state.config.watch_catalog).run()))
        try:
            yield
        finally:
            state.engine.stop()
            await asyncio.wait(tasks[:1], timeout=STOP_SECONDS)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            state.catalogs.close()
            if state.tracing is not None:
                await state.tracing.shutdown()

    app = FastAPI(
        title="loka-serve", version=__version__, description=DESCRIPTION, lifespan=lifespan, redoc_url=None,
        docs_url=None, openapi_url=None,
        default_response_class=Response,
    )  # fmt: skip
    app.add_exception_handler(ProblemError, _answer_problem)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_middleware(Envelope, state=state)
    routes = RecommendRoutes(state)
    _add_recommend_routes(app, routes)
    KServeRoutes(state, routes).add_to(app)
    _add_information_routes(app, state)
    CatalogRoutes(state).add_to(app)
    add_debug_routes(app, state)
    openapi.install(app, state.model, state.config.max_batch_requests, state.access.keys is not None)
    return app


def _add_recommend_routes(app: FastAPI, routes: RecommendRoutes) -> None:
    example: dict[str, Any] = {"history": ["item-1", "item-2"], "num_items": 10}
    app.add_api_route(
        RECOMMEND_PATH,
        routes.recommend,
        methods=["POST"],
        summary="Recommend items for one history",
        tags=["recommend"],
        responses=openapi.answers(
            "RecommendResponse", "Items, best first.", *problems.OF_RECOMMENDATIONS, problems.DEADLINE
        ),
        openapi_extra=openapi.json_body("RecommendRequest", example),
    )
    app.add_api_route(
        BATCH_PATH,
        routes.recommend_batch,
        methods=["POST"],
        summary="Recommend items for many histories",
        tags=["recommend"],
        responses=openapi.answers(
            "RecommendBatchResponse", "An answer or a problem for each request.", *problems.OF_RECOMMENDATIONS
        ),
        openapi_extra=openapi.json_body("RecommendBatchRequest", {"requests": [example]}),
    )


def _add_information_routes(app: FastAPI, state: ServerState) -> None:
    async def list_models(request: Request) -> Response:
        return json_response(_models(state))

    async def live(request: Request) -> Response:
        return json_response(schemas.Health("live"))

    async def ready(request: Request) -> Response:
        state.require_ready()
        return json_response(schemas.Health("ready"))

    async def metrics(request: Request) -> Response:
        return Response(state.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    def add(path: str, handler: Any, summary: str, tag: str, name: str, *kinds: ProblemKind) -> None:
        app.add_api_route(
            path,
            handler,
            methods=["GET"],
            summary=summary,
            tags=[tag],
            responses=openapi.answers(name, summary, *kinds),
        )

    add("/v1/models", list_models, "The served model and its limits", "models", "ModelList")
    add("/health/live", live, "Whether the API process lives", "health", "Health")
    add("/health/ready", ready, "Whether requests are taken", "health", "Health", problems.UNAVAILABLE)
    app.add_api_route("/metrics", metrics, methods=["GET"], include_in_schema=False)


def _models(state: ServerState) -> schemas.ModelList:
    model, engine = state.model, state.engine.ready
    return schemas.ModelList(
        [
            schemas.Model(
                name=model.name,
                engine=engine.engine if engine else None,
                device=engine.device if engine else None,
                levels=model.config.levels,
                codebook_sizes=list(model.config.codebook_sizes),
                beam_width=model.beam_width,
                features=[schemas.Feature(feature.name, list(feature.values)) for feature in model.config.features],
                limits=schemas.ModelLimits(model.max_batch, model.max_beam_width, model.max_context),
            )
        ]
    )


async def _answer_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error, context_of(request).request_id, request.url.path)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the same form as every other problem."""
    assert isinstance(error, HTTPException)
    kinds = {404: problems.NOT_FOUND, 405: problems.METHOD_NOT_ALLOWED}
    kind = kinds.get(error.status_code, ProblemKind("http", error.status_code, str(error.detail)))
    response = problem_response(ProblemError(kind, kind.title), context_of(request).request_id, request.url.path)
    if kind is problems.METHOD_NOT_ALLOWED:
        response.headers["Allow"] = ", ".join(_methods(request))
    return response


def _methods(request: Request) -> list[str]:
    """All methods of a path; the router knows only those of the first route that has it."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.path_regex.match(request.url.path)]
    return sorted({method for route in found for method in route.methods or ()})
