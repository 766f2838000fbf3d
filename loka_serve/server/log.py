"""One-line logs on standard error, as text or as JSON, the same in both processes."""

from __future__ import annotations

import logging
import sys
import time
from datetime import UTC, datetime

import msgspec

TEXT, JSON = "text", "json"
EXTRAS = ("request_id",)  # what a record may carry beside its message, for a search by it


class JsonFormatter(logging.Formatter):
    """An object a line: time (UTC, RFC 3339), level, process, logger, message, and where they are known the request's
    id and an exception with its traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "process": self.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: str(value) for name in EXTRAS if (value := getattr(record, name, None)) is not None}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        # A lone surrogate, as a file's name may hold, has no UTF-8.
        return msgspec.json.encode(
            {name: text.encode(errors="backslashreplace").decode() for name, text in entry.items()}
        ).decode()


def configure_logging(level: str, process: str, log_format: str = TEXT) -> None:
    """Log to standard error, as `time level process: message` or as JSON; times are UTC."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == JSON else _text_formatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.ERROR)  # a scanner must not be able to fill the log


def _text_formatter(process: str) -> logging.Formatter:
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process}: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter
