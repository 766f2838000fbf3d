"""GET /v1/catalog, PUT /v1/catalog and POST /v1/catalog/rollback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from loka_serve.server import openapi, problems, schemas
from loka_serve.server.bodies import check_encoding, too_large
from loka_serve.server.encoding import json_response
from loka_serve.server.problems import BODY_TIMEOUT, CANCELLED, FORBIDDEN, ProblemError, invalid
from loka_serve.server.state import ServerState

PATH = "/v1/catalog"
ROLLBACK_PATH = "/v1/catalog/rollback"


class CatalogRoutes:
    """Handlers that share one server's state."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    def add_to(self, app: FastAPI) -> None:
        """Register the routes."""
        upload = {"schema": {"type": "string", "format": "binary"}}
        app.add_api_route(
            PATH,
            self.show,
            methods=["GET"],
            summary="The live catalog",
            tags=["catalog"],
            responses=openapi.answers("CatalogInfo", "Version, size and attributes."),
        )
        app.add_api_route(
            PATH,
            self.replace,
            methods=["PUT"],
            summary="Replace the catalog between two batches",
            description="The body is a JSONL or Parquet file of `{item_id, semantic_id, ...attributes}`. A file with a "
            "mistake leaves the live catalog as it is. Open only with `--allow-catalog-updates`.",
            tags=["catalog"],
            responses=openapi.answers(
                "CatalogInfo",
                "The catalog that is live now.",
                *(FORBIDDEN, BODY_TIMEOUT, problems.CONFLICT, problems.TOO_LARGE, problems.UNSUPPORTED_ENCODING),
                *(problems.INVALID, problems.INTERNAL, problems.UNAVAILABLE),
            ),
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/octet-stream": upload},
                }
            },
        )
        app.add_api_route(
            ROLLBACK_PATH,
            self.roll_back,
            methods=["POST"],
            summary="Go back to the catalog before",
            description="Open only with `--allow-catalog-updates`.",
            tags=["catalog"],
            responses=openapi.answers(
                "CatalogInfo", "The catalog that is live now.", FORBIDDEN, problems.CONFLICT, problems.UNAVAILABLE
            ),
        )

    async def show(self, request: Request) -> Response:
        """The live catalog."""
        return json_response(self._info())

    async def replace(self, request: Request) -> Response:
        """Stream the body to a file, compile it, swap."""
        self._require_allowed()
        file = self.state.catalogs.new_file()
        try:
            await self._store(request, file)
            await self.state.catalogs.replace(file)
        finally:
            file.unlink(missing_ok=True)
        return json_response(self._info())

    async def roll_back(self, request: Request) -> Response:
        """Swap back."""
        self._require_allowed()
        await self.state.catalogs.roll_back()
        return json_response(self._info())

    def _require_allowed(self) -> None:
        if not self.state.config.allow_catalog_updates:
            raise ProblemError(FORBIDDEN, "catalog updates are off; start the server with --allow-catalog-updates")
        self.state.require_ready()

    async def _store(self, request: Request, file: Path) -> None:
        """The body, in chunks; each must come within the body timeout."""
        check_encoding(request)
        limit, timeout = self.state.config.max_catalog_bytes, self.state.config.body_timeout_s
        size = 0
        chunks = request.stream().__aiter__()
        try:
            with file.open("wb") as target:
                while True:
                    async with asyncio.timeout(timeout):
                        chunk = await anext(chunks, None)
                    if chunk is None:
                        break
                    size += len(chunk)
                    if size > limit:
                        raise too_large(limit)
                    target.write(chunk)
        except TimeoutError:
            raise ProblemError(BODY_TIMEOUT, f"the body stood still for {timeout:g} s") from None
        except ClientDisconnect:
            raise ProblemError(CANCELLED, "the client went away while sending") from None
        if not size:
            raise invalid("body", "expected a JSONL or Parquet file, got nothing")

    def _info(self) -> schemas.CatalogInfo:
        live, previous = self.state.catalogs.live, self.state.catalogs.previous
        attributes: list[Any] = [
            schemas.CatalogAttribute(name, len(column.values)) for name, column in live.attributes.items()
        ]
        return schemas.CatalogInfo(
            version=live.version,
            items=live.item_count,
            semantic_ids=live.trie.leaf_count,
            levels=live.levels,
            codebook_sizes=list(live.codebook_sizes),
            attributes=attributes,
            previous_version=previous.version if previous else None,
        )
