"""One engine process as the API process sees it: how it is started, the two sockets, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from loka_serve.server import messages
from loka_serve.server.messages import ToEngine


class EngineFailure(Exception):
    """The engine process cannot go on; `permanent` if a new one would fail in the same way."""

    def __init__(self, reason: str, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


@dataclass(frozen=True)
class EngineSettings:
    """How to start the engine process, and how long to be patient.

    Attributes:
        command: program and arguments; `--endpoint`, `--parent`, `--log-level` and `--log-format` are added.
        restarts: failed starts in a row before giving up.
    """

    command: Sequence[str]
    log_level: str
    start_timeout: float
    batch_timeout: float
    restarts: int
    log_format: str = "text"


class Connection:
    """One engine process with its sockets; a fresh address each time, so that no message of a dead one is ever read."""

    def __init__(self, settings: EngineSettings) -> None:
        # Sockets in a directory that only this user may enter.
        self.directory = tempfile.mkdtemp(prefix="loka-")
        self.endpoint = f"ipc://{self.directory}/engine"
        self.settings = settings
        self.context = zmq.asyncio.Context()
        self.results = self.context.socket(zmq.PULL)
        self.results.bind(f"{self.endpoint}.results")
        # Sending never waits: with two batches in flight the pipe cannot fill.
        self.work: zmq.Socket[bytes] = zmq.Context.shadow(self.context.underlying).socket(zmq.PUSH)
        self.work.bind(f"{self.endpoint}.work")
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process."""
        self.process = await asyncio.create_subprocess_exec(
            *self.settings.command,
            *("--endpoint", self.endpoint, "--parent", str(os.getpid())),
            *("--log-level", self.settings.log_level, "--log-format", self.settings.log_format),
        )

    def send(self, message: ToEngine) -> None:
        """Hand a message over; raises EngineFailure when nobody takes it."""
        try:
            self.work.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineFailure(f"the engine takes no messages: {error}") from None

    async def receive(self) -> messages.FromEngine:
        """The next message; raises EngineFailure on one that cannot be read."""
        try:
            return messages.decode_from_engine(await self.results.recv())
        except msgspec.DecodeError as error:
            raise EngineFailure(f"a message of the engine cannot be read: {error}") from None

    def abandon(self) -> None:
        """Kill the process if it still runs, and remove the files."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def close(self) -> None:
        """As `abandon`, and wait for the process to end."""
        self.abandon()
        if self.process is not None:
            await self.process.wait()
        self.work.close(linger=0)
        self.context.destroy(linger=0)
