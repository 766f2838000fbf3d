"""API keys from a file that may change while the server runs: compared in constant time, with a scope each."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from loka_serve.errors import ConfigError

logger = logging.getLogger(__name__)

RECOMMEND, ADMIN = "recommend", "admin"
SCOPES = (RECOMMEND, ADMIN)
LARGEST_FILE_BYTES = 1 << 20
LOOK_SECONDS = 1.0  # how often the file is looked at, and so how long a revoked key may still work
DIGEST_PREFIX = "sha256:"
EXPECTED_LINE = "expected NAME SCOPE KEY"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ApiKey:
    """Who may ask for what. `admin` may do all that `recommend` may.

    Attributes:
        digest: SHA-256 of the key; the key itself is not kept.
    """

    name: str
    scope: str
    digest: bytes


class ApiKeys:
    """The keys of a file, read again when it changes; a file that cannot be used leaves the keys before in force.

    Each line is `NAME SCOPE KEY`: scope `recommend` or `admin`; the key as 16 to 512 letters, digits and `._~+/=-`, or
    `sha256:` and the hexadecimal SHA-256 of it. Empty lines and those that begin with `#` do not count.

    Raises:
        ConfigError: names file, line and what was expected.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._seen = self._signature()
        self._keys = read_keys(file)

    def find(self, presented: str) -> ApiKey | None:
        """The key that a client shows. Takes as long whichever key it is, and if it is none."""
        self._look()
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                found = key
        return found

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        signature = self._signature()
        if signature == self._seen:
            return
        self._seen = signature
        try:
            self._keys = read_keys(self.file)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
        else:
            logger.info("API keys read again: %d", len(self._keys))

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self.file)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. No message quotes a key. Raises ConfigError."""
    try:
        with file.open("rb") as source:
            content = source.read(LARGEST_FILE_BYTES + 1)
        lines = content.decode().splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise ConfigError(f"{file}: expected UTF-8 text") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise ConfigError(f"{file}: larger than {LARGEST_FILE_BYTES} bytes")
    keys = [
        _read_line(line, f"{file}: line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not keys:
        raise ConfigError(f"{file}: no keys: {EXPECTED_LINE} on each line")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(f"{file}: a key is there twice: expected each once")
    return tuple(keys)


def _read_line(line: str, where: str) -> ApiKey:
    parts = line.split()
    if len(parts) != 3:
        raise ConfigError(f"{where}: {EXPECTED_LINE}, found {len(parts)} words")
    name, scope, key = parts
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: name: expected 1 to 64 letters, digits and ._-")
    if scope not in SCOPES:
        raise ConfigError(f"{where}: scope: expected one of {', '.join(SCOPES)}")
    if key.startswith(DIGEST_PREFIX):
        hexadecimal = key.removeprefix(DIGEST_PREFIX).lower()
        if not _DIGEST.fullmatch(hexadecimal):
            raise ConfigError(f"{where}: key: expected 64 hexadecimal digits after {DIGEST_PREFIX}")
        return ApiKey(name, scope, bytes.fromhex(hexadecimal))
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: key: expected 16 to 512 letters, digits and ._~+/=-")
    return ApiKey(name, scope, hashlib.sha256(key.encode()).digest())
