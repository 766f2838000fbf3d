"""Result files: written after every row, so that a run that is cut short loses nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loka_serve.errors import ConfigError

Row = dict[str, Any]


class ResultFile:
    """Rows with what they share (environment, ceilings). Writing replaces the file in one step."""

    def __init__(self, path: Path, shared: Mapping[str, Any]) -> None:
        self._path = path
        self._content: dict[str, Any] = {**shared, "rows": []}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def rows(self) -> list[Row]:
        return self._content["rows"]

    def keep(self, previous: Path, key_fields: tuple[str, ...], replaced: set[tuple[Any, ...]]) -> None:
        """Take over the rows of an earlier file, except those whose key is to be measured again.

        Raises:
            ConfigError: they are of another GPU, of other libraries or of another commit, or the file is no result.
        """
        try:
            content = json.loads(previous.read_text())
            environment = {**content["environment"]}
            kept = [row for row in content["rows"] if tuple(row[field] for field in key_fields) not in replaced]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--keep: {previous} is no result file: {type(error).__name__}: {error}") from error
        for field in ("gpu", "driver", "cuda", "libraries", "commit"):
            found, here = environment.get(field), self._content["environment"].get(field)
            if found != here:
                raise ConfigError(f"{previous}: its {field} is {found}: expected {here}, or measure all rows again")
        self.rows.extend(kept)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(self._content, indent=1) + "\n")
        os.replace(partial, self._path)
