"""What the readers of item files have in common."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from loka_serve.catalog.table import ItemTable
from loka_serve.errors import CatalogError

HEAD_BYTES = 4096  # enough of a file to tell its format by
# As many digits may be an integer beyond 64 bits: orjson would silently make it a float, and lose its last digits. With
# all digits made zeros they are found faster than by a regular expression.
_LONG_NUMBER = b"0" * 19
_ZEROS = bytes.maketrans(b"123456789", b"000000000")


@dataclass(frozen=True)
class Source:
    """A path to read, with the first bytes of the file (empty for a directory)."""

    path: Path
    head: bytes

    @property
    def suffix(self) -> str:
        """Extension of the file, lower case, with its dot."""
        return self.path.suffix.lower()


class CatalogReader(Protocol):
    """One file format."""

    name: str  # as a person would call it

    def matches(self, source: Source) -> bool:
        """Whether this reader takes the source, judged by extension and first bytes."""
        ...

    def read(self, path: Path, codebook_sizes: Sequence[int] | None, levels: int | None) -> ItemTable:
        """Read all items.

        Args:
            path: what :meth:`matches` accepted.
            codebook_sizes: one size for each level, or None to infer them.
            levels: the number of levels expected, or None to take what the file has.

        Raises:
            CatalogError: naming file, place and field, and what was expected.
        """
        ...


def decode_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file with their line ends; a byte order mark is skipped."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise CatalogError(f"{path}, line {number}: expected UTF-8 text, got: {error}") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file that are not blank, without line ends, with their numbers from 1."""
    for number, line in enumerate(decode_lines(path), start=1):
        stripped = line.rstrip("\r\n")
        if stripped and not stripped.isspace():
            yield number, stripped


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON Lines file with their line numbers from 1; blank lines are skipped.

    Integers stay exact, however large. NaN and infinities, which strict JSON does not have, are let through: the check
    of their field names the field. So are integers of more digits than Python reads, as infinities.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.isspace():
                continue
            try:
                row = orjson.loads(line)
                is_exact = _LONG_NUMBER not in line.translate(_ZEROS)
            except orjson.JSONDecodeError:
                is_exact = False
            if not is_exact:
                row = _parse_leniently(path, number, line)
            if not isinstance(row, dict):
                raise CatalogError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
            yield number, row


def _parse_leniently(path: Path, number: int, line: bytes) -> object:
    """Parse a line that is beyond strict JSON with 64-bit integers: to let NaN pass, or say what is wrong."""
    try:
        return _decode(json.JSONDecoder(parse_int=_integer), line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path}, line {number}: expected UTF-8 text, got: {error}") from None
    except ValueError as error:
        raise CatalogError(f"{path}, line {number}: expected valid JSON, got: {error}") from None


def read_json_object(path: Path) -> dict[str, object]:
    """Parse a file that holds one JSON object; a key given twice is an error, not a silent choice."""
    try:
        parsed = _decode(json.JSONDecoder(object_pairs_hook=_object), path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise CatalogError(f"{path}: expected valid JSON, got: {error}") from None
    if not isinstance(parsed, dict):
        raise CatalogError(f"{path}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _integer(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # beyond the digits that Python reads (4300 unless it is told otherwise)
        return -math.inf if text.startswith("-") else math.inf


def _decode(decoder: json.JSONDecoder, text: str) -> object:
    try:
        return decoder.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f'key "{repeated}" is given twice in one object')
    return parsed
