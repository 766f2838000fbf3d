"""How a frozen dataclass becomes a command line: each field is a flag and an environment variable."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from loka_serve import __version__
from loka_serve.config_file import read_config_file
from loka_serve.errors import ConfigError

Settings = TypeVar("Settings")
CONFIG_VARIABLE = "LOKA_CONFIG"
EPILOG = (
    "Each flag is also an environment variable, --max-batch 8 is LOKA_MAX_BATCH=8, and a line of the file of --config, "
    "max_batch = 8. A flag wins over a variable, a variable over the file."
)


class Kind(Protocol):
    """How one setting is read: what is expected, in words, and the parser."""

    @property
    def expected(self) -> str: ...

    @property
    def metavar(self) -> str: ...

    def parse(self, text: str) -> Any:
        """The value of `text`; raises ValueError if it is not as expected."""


@dataclass(frozen=True)
class Integer:
    """A whole number from `low` to `high`, both included."""

    low: int
    high: int
    metavar: ClassVar[str] = "N"

    @property
    def expected(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def parse(self, text: str) -> int:
        value = int(text)
        if not self.low <= value <= self.high:
            raise ValueError(text)
        return value


@dataclass(frozen=True)
class Number:
    """A real number from `low` to `high`, both included."""

    low: float
    high: float
    metavar: ClassVar[str] = "X"

    @property
    def expected(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> float:
        value = float(text)
        if not self.low <= value <= self.high:  # also refuses NaN
            raise ValueError(text)
        return value


@dataclass(frozen=True)
class Sizes:
    """Ascending whole numbers from 1, or `auto`, which is none of them."""

    expected: ClassVar[str] = "auto, or ascending whole numbers from 1 like 1,8,32"
    metavar: ClassVar[str] = "N,N,..."

    def parse(self, text: str) -> tuple[int, ...]:
        if text.strip().lower() == "auto":
            return ()
        sizes = tuple(int(part) for part in text.split(","))
        if sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(text)
        return sizes


@dataclass(frozen=True)
class Text:
    """A text that is not empty."""

    metavar: str = "TEXT"
    expected: ClassVar[str] = "a text that is not empty"

    def parse(self, text: str) -> str:
        if not text.strip():
            raise ValueError(text)
        return text.strip()


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        return "one of " + ", ".join(self.words)

    @property
    def metavar(self) -> str:
        return "{" + ",".join(self.words) + "}"

    def parse(self, text: str) -> str:
        word = text.strip().lower()
        if word not in self.words:
            raise ValueError(text)
        return word


@dataclass(frozen=True)
class Directory:
    """An existing directory."""

    expected: ClassVar[str] = "an existing directory"
    metavar: ClassVar[str] = "DIR"

    def parse(self, text: str) -> Path:
        path = Path(text).expanduser()
        if not text or not path.is_dir():
            raise ValueError(text)
        return path


@dataclass(frozen=True)
class ExistingPath:
    """An existing file or directory."""

    expected: ClassVar[str] = "an existing file or directory"
    metavar: ClassVar[str] = "PATH"

    def parse(self, text: str) -> Path:
        path = Path(text).expanduser()
        if not text or not path.exists():
            raise ValueError(text)
        return path


@dataclass(frozen=True)
class OutputPath:
    """A path to write to; it need not exist."""

    expected: ClassVar[str] = "a path that ends in a name"
    metavar: ClassVar[str] = "PATH"

    def parse(self, text: str) -> Path:
        path = Path(text).expanduser().absolute()
        if not text.strip() or path.name in ("", ".."):  # the root has no name
            raise ValueError(text)
        return path


@dataclass(frozen=True)
class Device:
    """Where an engine computes."""

    expected: ClassVar[str] = "auto, cpu, cuda or cuda:N"
    metavar: ClassVar[str] = "DEVICE"

    def parse(self, text: str) -> str:
        device = text.strip().lower()
        kind, colon, index = device.partition(":")
        if device not in ("auto", "cpu", "cuda") and not (kind == "cuda" and colon and index.isdecimal()):
            raise ValueError(text)
        return device


@dataclass(frozen=True)
class Switch:
    """On or off; as a flag it takes no value."""

    expected: ClassVar[str] = "true or false"
    metavar: ClassVar[str] = ""

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off", ""):
            return False
        raise ValueError(text)


def setting(kind: Kind, description: str, group: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that is also a flag and an environment variable; without a default it is required."""
    return dataclasses.field(default=default, metadata={"kind": kind, "description": description, "group": group})


def flag_of(field: str) -> str:
    """`max_batch` -> `--max-batch`."""
    return "--" + field.replace("_", "-")


def variable_of(field: str) -> str:
    """`max_batch` -> `LOKA_MAX_BATCH`."""
    return "LOKA_" + field.upper()


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as one error instead of printing its usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def read_settings(
    cls: type[Settings], program: str, description: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Settings:
    """Build the settings dataclass `cls` from flags, then environment variables, then a file, then defaults."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    parser = _Parser(
        prog=program,
        description=description,
        epilog=EPILOG,
        usage=f"{program} [options]",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=110),
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--config", metavar="FILE", help="a TOML file of settings (default: none)")
    groups: dict[str, Any] = {}
    for field in fields:
        kind: Kind = field.metadata["kind"]
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        options: dict[str, Any] = {"help": _help_of(field), "dest": field.name}
        if isinstance(kind, Switch):
            groups[title].add_argument(flag_of(field.name), action=argparse.BooleanOptionalAction, **options)
        else:
            groups[title].add_argument(flag_of(field.name), metavar=kind.metavar, **options)
    given = vars(parser.parse_args(list(arguments)))
    file = given["config"] or environment.get(CONFIG_VARIABLE)
    in_file = read_config_file(Path(file).expanduser(), [field.name for field in fields]) if file else {}
    values = {}
    for field in fields:
        source, text = flag_of(field.name), given[field.name]
        if text is None:
            source, text = variable_of(field.name), environment.get(variable_of(field.name))
        if text is None:
            source, text = f"{file}: {field.name}", in_file.get(field.name)
        if text is not None:
            is_switch = isinstance(field.metadata["kind"], Switch)
            values[field.name] = text if isinstance(text, bool) and is_switch else _parse(field, source, str(text))
        elif field.default is dataclasses.MISSING:
            kind = field.metadata["kind"]
            raise ConfigError(
                f"{flag_of(field.name)} (or {variable_of(field.name)}) is missing: expected {kind.expected}"
            )
    return cls(**values)


def _parse(field: dataclasses.Field[Any], source: str, text: str) -> Any:
    kind: Kind = field.metadata["kind"]
    try:
        return kind.parse(text)
    except ValueError:
        raise ConfigError(f"{source}: expected {kind.expected}, got {text!r}") from None


def _help_of(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata["description"])
    if field.default is dataclasses.MISSING:
        return f"{text} (required)"
    if isinstance(field.default, bool):
        return f"{text} (default: {'on' if field.default else 'off'})"
    if field.default is None:
        return text
    if field.default == ():
        return f"{text} (default: auto)"
    return (
        f"{text} (default: {field.default:g})"
        if isinstance(field.default, float)
        else f"{text} (default: {field.default})"
    )
