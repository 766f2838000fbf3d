"""What the commands of examples and benchmarks share: arguments checked where they are read, errors of one line.

The commands for users, build and serve, read theirs through `loka_serve.settings`, from the environment as well.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from loka_serve.errors import LokaError

EXIT_ERROR = 2


class CommandParser(argparse.ArgumentParser):
    """Shows a module's docstring as it stands; a wrong argument ends the command with one line and exit code 2."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"error: {message} (see --help)\n")


def positive(text: str) -> int:
    """A whole number from 1, for `add_argument(type=...)`."""
    return _whole(text, 1, math.inf, "a whole number from 1")


def not_negative(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0, math.inf, "a whole number from 0")


def zero_or_one(text: str) -> int:
    """Off or on, where that is kept as a number."""
    return _whole(text, 0, 1, "0 or 1")


def _whole(text: str, low: float, high: float, expected: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
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


def existing_file(text: str) -> Path:
    """A file to read."""
    path = Path(text)
    if not os.path.isfile(path):
        raise argparse.ArgumentTypeError(f"expected an existing file, got {text!r}")
    return path


def output_file(text: str) -> Path:
    """A file that can be written, in a folder that exists or can be made: asked before the work, not after it."""
    path = Path(text)
    folder = Path(os.path.abspath(path)).parent
    while not os.path.lexists(folder):
        folder = folder.parent
    problem = ""
    if not text or os.path.isdir(path):
        problem = "it is a folder"
    elif not os.path.isdir(folder):
        problem = f"{folder} is no folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"{folder} may not be written to"
    elif os.path.lexists(path) and not os.access(path, os.W_OK):
        problem = "it may not be written"
    if problem:
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}: {problem}")
    return path


def run_command_line(main: Callable[[], None]) -> None:
    """Runs a command; what the user can mend ends it with one line that names the file or field, and exit code 2."""
    try:
        main()
    except LokaError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        return
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(EXIT_ERROR)
