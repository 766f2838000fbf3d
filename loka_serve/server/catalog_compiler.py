"""Reads an uploaded catalog in a process of its own, so that the API process keeps answering meanwhile.

`python -m loka_serve.server.catalog_compiler SOURCE TARGET SIZE...` compiles SOURCE for codebooks of these sizes. What
is wrong with SOURCE goes to standard output, with exit status 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

from loka_serve.catalog.readers import read_catalog
from loka_serve.errors import CatalogError

REFUSED_STATUS = 2


def main() -> int:
    """Compile; returns the exit status."""
    source, target, *sizes = sys.argv[1:]
    try:
        read_catalog(Path(source), codebook_sizes=[int(size) for size in sizes]).save(Path(target))
    except CatalogError as error:
        print(error)
        return REFUSED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
