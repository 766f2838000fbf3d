"""Errors that a user can act on: each names the file or field and says what was expected."""

from __future__ import annotations


class LokaError(Exception):
    """Base of every expected error. Command lines print it as one line and exit with code 2."""


class ConfigError(LokaError):
    """A flag, environment variable or line of a configuration file that is unknown, missing or not as expected."""


class CheckpointError(LokaError):
    """A checkpoint directory that is missing something, holds something unknown, or does not fit its configuration."""


class CatalogError(LokaError):
    """An item or history file that cannot be read; the message names file, line (or key) and field."""


class QuantizationError(LokaError):
    """A precision plan or quantized weight that does not fit the model."""


class ProbeError(LokaError):
    """Saved statistics of the probe that are missing, damaged or of another format."""


class BundleError(LokaError):
    """A bundle that is damaged, incomplete or of another format version."""


class EngineError(LokaError):
    """A request or configuration beyond what an engine can run; the message names the limit."""


class TuningError(LokaError):
    """No setting meets the bounds; the message says what came closest."""


class RequestError(LokaError):
    """A request field that is malformed or out of range.

    Attributes:
        field: dotted path of the field in the request body, for example ``filter.department``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
