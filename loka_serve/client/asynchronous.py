"""The client for asyncio: as the other one, with `await`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Self, Unpack

import httpx

from loka_serve.client import answers, requests
from loka_serve.client.answers import CatalogInfo, Model, Recommendation
from loka_serve.client.errors import ClientError, NoAnswer, RequestFailed, failure_of
from loka_serve.client.requests import Call, RequestFields
from loka_serve.client.retries import Retries
from loka_serve.client.synchronous import READY_POLL_SECONDS, TIMEOUT_SECONDS, UPLOAD_SECONDS

CHUNK_BYTES = 1 << 20


class AsyncClient:
    """Speaks to one server over a pool of connections, within one event loop. Arguments as of `Client`.

    Args:
        connections: most connections at once; further calls wait for one, within their time.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
        connections: int = 100,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout = timeout
        self._retries = retries or Retries()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=requests.headers_of(api_key, headers),
            timeout=timeout,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            transport=transport,
        )

    async def recommend(self, **fields: Unpack[RequestFields]) -> Recommendation:
        """Items for one history. Raises ClientError: see `loka_serve.client.errors` for its kinds."""
        return answers.recommendation(await self._call(requests.recommend_call(fields)))

    async def recommend_batch(self, batch: Sequence[RequestFields]) -> list[Recommendation | RequestFailed]:
        """An answer for each request, in their order: one that failed alone is there as its error, not raised."""
        return answers.recommendations(await self._call(requests.batch_call(batch)))

    async def models(self) -> Sequence[Model]:
        """The served models and their limits."""
        return answers.models(await self._call(Call("GET", requests.MODELS)))

    async def catalog(self) -> CatalogInfo:
        """The live catalog."""
        return answers.decode(await self._call(Call("GET", requests.CATALOG)), CatalogInfo)

    async def replace_catalog(self, file: Path | str, timeout: float = UPLOAD_SECONDS) -> CatalogInfo:
        """Upload a JSONL or Parquet file; returns when it is live."""
        body = await self._call(Call("PUT", requests.CATALOG, file=Path(file)), timeout)
        return answers.decode(body, CatalogInfo)

    async def roll_back_catalog(self) -> CatalogInfo:
        """Go back to the catalog before."""
        return answers.decode(await self._call(requests.ROLL_BACK), CatalogInfo)

    async def is_ready(self) -> bool:
        """Whether requests are taken now."""
        try:
            await self._send(Call("GET", requests.READY), self._timeout)
        except ClientError:
            return False
        return True

    async def wait_until_ready(self, seconds: float) -> None:
        """Until requests are taken; raises the last error after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self._send(Call("GET", requests.READY), min(self._timeout, seconds))
                return
            except ClientError:
                if time.monotonic() + READY_POLL_SECONDS > deadline:
                    raise
            await asyncio.sleep(READY_POLL_SECONDS)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, call: Call, timeout: float | None = None) -> bytes:
        """The body of a good answer, with new attempts as `Retries` says."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        attempt = 1
        while True:
            try:
                return await self._send(call, deadline - time.monotonic())
            except ClientError as error:
                wait = self._retries.wait_after(error, call, attempt, deadline - time.monotonic())
                if wait is None:
                    raise
            await asyncio.sleep(wait)
            attempt += 1

    async def _send(self, call: Call, timeout: float) -> bytes:
        content = call.body if call.file is None else _chunks(call.file)
        try:
            async with asyncio.timeout(timeout):
                response = await self._http.request(
                    call.method, call.path, content=content, headers=call.headers, timeout=timeout
                )
        except (httpx.HTTPError, TimeoutError) as error:
            raise NoAnswer(f"{call.method} {call.path}: {type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise failure_of(response.status_code, response.content, response.headers)
        return response.content


async def _chunks(file: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(file.open, "rb") as source:
        while chunk := await asyncio.to_thread(source.read, CHUNK_BYTES):
            yield chunk
