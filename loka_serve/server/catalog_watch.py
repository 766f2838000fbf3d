"""A catalog file that is watched: whenever it is replaced, its content goes live as if it had come over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

from loka_serve.server.problems import ProblemError
from loka_serve.server.state import ServerState

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
Signature = tuple[int, int, int]


class CatalogWatcher:
    """Looks at a file every second, from the start of the server on.

    A file counts once it has stood still between two looks, so that one that is being written is not read. What it
    holds is checked and compiled beside the live catalog; a file that is bad, or that the engine cannot take, leaves
    that one live and is not tried again before it changes. While the engine is down, or another update is under way, it
    is.
    """

    def __init__(self, state: ServerState, path: Path, poll_seconds: float = POLL_SECONDS) -> None:
        self._state, self._path, self._poll_seconds = state, path, poll_seconds
        self._seen: Signature | None = None
        self._done: Signature | None = None

    async def run(self) -> None:
        """Until cancelled; nothing that a file does ends it."""
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("%s: the catalog file could not be taken", self._path)
            await asyncio.sleep(self._poll_seconds)

    async def look(self) -> None:
        """Take the file if it is new and at rest."""
        signature = _signature(self._path)
        at_rest, self._seen = signature == self._seen, signature
        if signature is None or not at_rest or signature == self._done or self._state.draining:
            return
        copy = self._state.catalogs.new_file()
        try:
            self._state.batcher.require_up()
            await asyncio.to_thread(shutil.copyfile, self._path, copy)
            if _signature(self._path) != signature:
                return
            await self._state.catalogs.replace(copy)
        except ProblemError as error:
            if error.retry_after is None:
                self._done = signature
            found = "; ".join(one.message for one in error.errors) or error.detail
            logger.warning("%s: the live catalog stays: %s", self._path, found)
            return
        finally:
            copy.unlink(missing_ok=True)
        self._done = signature
        logger.info("%s: live, version %s", self._path, self._state.catalogs.live.version)


def _signature(path: Path) -> Signature | None:
    """What changes when a file is replaced or written to; None while there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
