"""Plain one-line logs on standard error, the same in both processes."""

from __future__ import annotations

import logging
import sys
import time


def configure_logging(level: str, process: str) -> None:
    """Log to standard error as `time level process: message`; times are UTC."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process}: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.ERROR)  # a scanner must not be able to fill the log
