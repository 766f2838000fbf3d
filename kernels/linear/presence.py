"""Optional libraries: a module where it imports, its version, or the reason for its absence."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from dataclasses import dataclass
from types import ModuleType

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Presence:
    """Whether a library is here: its version, or why it is absent (and then `version` is None)."""

    library: str
    version: str | None
    reason: str = ""

    def __str__(self) -> str:
        return self.version if self.version is not None else f"absent: {self.reason}"


Found = tuple[ModuleType | None, Presence]


@functools.cache
def find_library(library: str, module: str, distributions: tuple[str, ...]) -> Found:
    """A module and its presence; what a broken installation raises while it is imported is its reason."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # some look for a CUDA toolkit when imported, and assert
        if not isinstance(error, ImportError):
            logger.warning("%s does not import: %s", module, error)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return None, Presence(library, None, reason)
    for distribution in distributions:
        try:
            return found, Presence(library, f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found, Presence(library, str(getattr(found, "__version__", "unknown")))


def required(found: Found) -> ModuleType:
    """The module; raises RuntimeError, with the reason, where it is absent."""
    module, presence = found
    if module is None:
        raise RuntimeError(f"{presence.library} is not here: {presence.reason}")
    return module
