"""The client for code without asyncio."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, Unpack

import httpx

from loka_serve.client import answers, requests
from loka_serve.client.answers import CatalogInfo, Model, Recommendation
from loka_serve.client.errors import ClientError, NoAnswer, RequestFailed, failure_of
from loka_serve.client.requests import Call, RequestFields
from loka_serve.client.retries import Retries

TIMEOUT_SECONDS, UPLOAD_SECONDS = 10.0, 600.0
READY_POLL_SECONDS = 0.1


class Client:
    """Speaks to one server over a pool of connections; may be shared by threads.

    Args:
        url: of the server, such as `http://localhost:8000`.
        api_key: where the server asks for one.
        timeout: seconds that a call may take, waits and new attempts included.
        headers: sent with every request.
        transport: in place of the network, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._timeout = timeout
        self._retries = retries or Retries()
        self._http = httpx.Client(
            base_url=url, headers=requests.headers_of(api_key, headers), timeout=timeout, transport=transport
        )

    def recommend(self, **fields: Unpack[RequestFields]) -> Recommendation:
        """Items for one history. Raises ClientError: see `loka_serve.client.errors` for its kinds."""
        return answers.recommendation(self._call(requests.recommend_call(fields)))

    def recommend_batch(self, batch: Sequence[RequestFields]) -> list[Recommendation | RequestFailed]:
        """An answer for each request, in their order: one that failed alone is there as its error, not raised."""
        return answers.recommendations(self._call(requests.batch_call(batch)))

    def models(self) -> Sequence[Model]:
        """The served models and their limits."""
        return answers.models(self._call(Call("GET", requests.MODELS)))

    def catalog(self) -> CatalogInfo:
        """The live catalog."""
        return answers.decode(self._call(Call("GET", requests.CATALOG)), CatalogInfo)

    def replace_catalog(self, file: Path | str, timeout: float = UPLOAD_SECONDS) -> CatalogInfo:
        """Upload a JSONL or Parquet file; returns when it is live."""
        body = self._call(Call("PUT", requests.CATALOG, file=Path(file)), timeout)
        return answers.decode(body, CatalogInfo)

    def roll_back_catalog(self) -> CatalogInfo:
        """Go back to the catalog before."""
        return answers.decode(self._call(requests.ROLL_BACK), CatalogInfo)

    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        try:
            self._send(Call("GET", requests.READY), self._timeout)
        except ClientError:
            return False
        return True

    def wait_until_ready(self, seconds: float) -> None:
        """Until requests are taken; raises the last error after so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._send(Call("GET", requests.READY), min(self._timeout, seconds))
                return
            except ClientError:
                if time.monotonic() + READY_POLL_SECONDS > deadline:
                    raise
            time.sleep(READY_POLL_SECONDS)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, call: Call, timeout: float | None = None) -> bytes:
        """The body of a good answer, with new attempts as `Retries` says."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        attempt = 1
        while True:
            try:
                return self._send(call, deadline - time.monotonic())
            except ClientError as error:
                wait = self._retries.wait_after(error, call, attempt, deadline - time.monotonic())
                if wait is None:
                    raise
            time.sleep(wait)
            attempt += 1

    def _send(self, call: Call, timeout: float) -> bytes:
        try:
            if call.file is None:
                response = self._http.request(call.method, call.path, content=call.body, timeout=timeout)
            else:
                with call.file.open("rb") as content:
                    response = self._http.request(
                        call.method, call.path, content=content, headers=call.headers, timeout=timeout
                    )
        except httpx.HTTPError as error:
            raise NoAnswer(f"{call.method} {call.path}: {type(error).__name__}: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise failure_of(response.status_code, response.content, response.headers)
        return response.content
