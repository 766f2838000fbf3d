"""A TOML file with settings of a command line, for `--config FILE`: `max_batch = 8` is `--max-batch 8`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path

from loka_serve.errors import ConfigError

LARGEST_FILE_BYTES = 1 << 20


def read_config_file(file: Path, names: Sequence[str]) -> dict[str, str | bool]:
    """The settings of a file as texts, or as they are where they are on or off.

    Args:
        names: the settings that there are.

    Raises:
        ConfigError: names the file, and the key that is unknown or of no usable type.
    """
    try:
        with file.open("rb") as source:
            content = source.read(LARGEST_FILE_BYTES + 1)
        if len(content) > LARGEST_FILE_BYTES:
            raise ConfigError(f"{file}: larger than {LARGEST_FILE_BYTES} bytes")
        values = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's errors are ValueErrors
        raise ConfigError(f"{file}: expected TOML: {error}") from None
    settings = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in names:
            similar = difflib.get_close_matches(name, names, 1)
            raise ConfigError(f"{file}: {key}: unknown setting" + (f"; did you mean {similar[0]}?" if similar else ""))
        if name in settings:
            raise ConfigError(f"{file}: {key}: expected each setting once")
        settings[name] = _text_of(value, f"{file}: {key}")
    return settings


def _text_of(value: object, where: str) -> str | bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(type(part) is int for part in value):
        return ",".join(map(str, value))
    raise ConfigError(f"{where}: expected a text, a number, true or false, or a list of whole numbers")
