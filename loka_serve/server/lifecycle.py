"""Start and end of the API process: one listening socket, signals that drain, exit statuses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
from types import FrameType

import uvicorn

from loka_serve.config import ServerConfig
from loka_serve.errors import ConfigError
from loka_serve.server.app import create_app
from loka_serve.server.http_protocol import bounded_protocol
from loka_serve.server.state import ServerState

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75  # longer than the usual 60 s of load balancers, so that it is they who close idle connections
# Allocations between two collections. With Python's own 700 a large body, hundreds of thousands of lists none of which
# is garbage, takes five times as long to decode, and nobody else is answered meanwhile.
GC_THRESHOLDS = (100_000, 20, 100)
MOST_FILES = 65_536
UNTAKEN_SECONDS = 30  # for a client to take what is sent to it
DRAIN_POLL_SECONDS = 0.02
QUIET_SECONDS = 0.25  # without a request for so long, nobody is left who could lose one
REFUSING_SECONDS = 1.0  # of answering 503 once nothing is in flight, to clients who do not stop coming
CLOSING_SECONDS = 1.0  # for the requests on connections that are open when nobody new is let in


def listen(config: ServerConfig) -> socket.socket:
    """A bound socket, before anything slow is loaded.

    Raises:
        ConfigError: names the flag that the system does not accept.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: connections inherit it; who does not take an answer is cut off
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNTAKEN_SECONDS)
    try:
        listener.bind((config.host, config.port))
    except socket.gaierror:
        raise ConfigError(f"--host: expected an address of this machine, got {config.host!r}") from None
    except OSError as error:
        what = f"--host {config.host} --port {config.port}"
        raise ConfigError(f"{what}: cannot listen there: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(state: ServerState, listener: socket.socket) -> int:
    """Serve until told to stop; returns the exit status."""
    server = GracefulServer(state)
    state.engine.on_give_up = server.give_up
    raise_file_limit()
    gc.collect()
    gc.freeze()  # catalog, application: they stay to the end, so need not be walked through again and again
    gc.set_threshold(*GC_THRESHOLDS)
    logger.info("listening on %s; ready once the engine has warmed up", address_of(listener))
    warn_of_open_port(state.config)
    server.run(sockets=[listener])
    return server.exit_status


def raise_file_limit() -> None:
    """Room for many connections: the usual 1,024 files are soon taken by slow clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def warn_of_open_port(config: ServerConfig) -> None:
    """Say it in the log where other machines may ask without a key."""
    local = config.host in ("localhost", "::1") or config.host.startswith("127.")
    if not local and config.api_keys_file is None:
        logger.warning("whoever reaches %s port %d may ask: no --api-keys-file", config.host, config.port)


class GracefulServer(uvicorn.Server):
    """uvicorn, but SIGTERM and SIGINT answer what is in flight while new requests get 503; a second one ends it."""

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self.exit_status = 0
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(
            uvicorn.Config(
                create_app(state),
                loop="uvloop",
                http=bounded_protocol(state.config.max_connections),
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=2,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler in place of uvicorn's, which raises the signal again at the end and so loses the status."""
        if self.state.draining or self._loop is None:
            self.state.engine.abandon()
            self.state.catalogs.close()
            os._exit(128 + sig)
        self.state.draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def give_up(self, reason: str, permanent: bool) -> None:
        """End with an error: status 2 for what a new start would not mend, else 1 for an orchestrator to try again."""
        logger.error("giving up: %s", reason)
        self.exit_status = 2 if permanent else 1
        self.state.draining = True
        self.should_exit = True

    def _start_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        """Wait for the requests in flight, then for those that still arrive and get their 503.

        As long as new ones keep coming there is no quiet moment: the door is then closed after `REFUSING_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.state.config.drain_timeout_s
        logger.info("draining: %d requests in flight", self.state.requests_in_flight)
        while self.state.requests_in_flight and loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        if not await self._quiet(min(deadline, loop.time() + REFUSING_SECONDS)):
            for server in self.servers:
                server.close()  # no new connections; those that are open are closed with their next answer
            await self._quiet(min(deadline, loop.time() + CLOSING_SECONDS))
        if self.state.requests_in_flight:
            logger.warning("not answered within the drain timeout: %d requests", self.state.requests_in_flight)
            self.state.batcher.engine_down("the server is shutting down")  # a word to those who still wait
        self.should_exit = True

    async def _quiet(self, deadline: float) -> bool:
        """Wait until no request was there for `QUIET_SECONDS`; False if that did not come about in time."""
        loop = asyncio.get_running_loop()
        quiet_since, seen = loop.time(), self.server_state.total_requests
        while loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
            if self.state.requests_in_flight or self.server_state.total_requests != seen:
                quiet_since, seen = loop.time(), self.server_state.total_requests
            elif loop.time() - quiet_since >= QUIET_SECONDS:
                return True
        return False
