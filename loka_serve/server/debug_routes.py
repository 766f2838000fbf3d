"""GET /v1/debug/batches: what the last batches were like."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from loka_serve.server import openapi
from loka_serve.server.encoding import json_response
from loka_serve.server.problems import FORBIDDEN, ProblemError
from loka_serve.server.state import ServerState

BATCHES_PATH = "/v1/debug/batches"


def add_debug_routes(app: FastAPI, state: ServerState) -> None:
    """Register the route."""

    async def batches(request: Request) -> Response:
        if state.access.keys is None and not state.config.allow_debug:
            detail = "debug routes are closed; start the server with --api-keys-file or --allow-debug"
            raise ProblemError(FORBIDDEN, detail)
        records = reversed(state.batcher.log.records)
        return json_response({"batches": [record.to_dict() for record in records]})

    app.add_api_route(
        BATCHES_PATH,
        batches,
        methods=["GET"],
        summary="The last 100 batches, newest first",
        description="Sizes, beams, waits and times; nothing of any client. Needs a key of the scope admin, or a server "
        "without keys that was started with `--allow-debug`.",
        tags=["debug"],
        responses=openapi.answers("BatchList", "The last 100 batches, newest first.", FORBIDDEN),
    )
