"""A process that sends load, apart from its caller's: the caller's own work does not delay requests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("spawn")


class Worker:
    """Runs `target(pipe, *arguments)` in a process of its own, which talks through the pipe."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        ours, theirs = _context.Pipe()
        self._pipe: Connection = ours
        self._process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, word: Any) -> None:
        self._pipe.send(word)

    def hear(self, seconds: float) -> Any:
        """The next word from the process.

        Raises:
            RuntimeError: it ended, or said nothing for so long; it is killed then.
        """
        try:
            if self._pipe.poll(max(seconds, 0.0)):
                return self._pipe.recv()
            reason = f"no word within {seconds:.0f} s"
        except EOFError:
            reason = "it ended"
        self.stop()
        raise RuntimeError(f"a process of the load generator failed: {reason}")

    def join(self) -> None:
        self._process.join()

    def stop(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()
