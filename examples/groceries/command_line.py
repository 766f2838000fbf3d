"""What the example's commands share: arguments that are checked where they are read, and errors of one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from loka_serve.errors import LokaError


def positive(text: str) -> int:
    """A whole number from 1, for `add_argument(type=...)`."""
    return _at_least(text, 1)


def not_negative(text: str) -> int:
    """A whole number from 0."""
    return _at_least(text, 0)


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text!r}")
    return value


def duration(text: str) -> float:
    """Seconds, more than none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return value


def usable_device(text: str) -> str:
    """A device of torch that is here."""
    import torch

    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not usable here: {str(error).splitlines()[0]}") from None
    return text


def run_command_line(main: Callable[[], None]) -> None:
    """Runs a command; what the user can mend ends it with one line that names the file or field."""
    try:
        main()
    except LokaError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        raise SystemExit(f"error: {error.filename or ''}: {error.strerror or error}") from None
