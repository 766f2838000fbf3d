"""`python -m loka_serve.report --bundle DIR`: write a bundle's report again, for example with measured speeds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loka_serve.bundle import Bundle, add_files
from loka_serve.errors import LokaError
from loka_serve.report.files import PAGE_FILE, report_files
from loka_serve.settings import Directory, ExistingPath, read_settings, setting

EXIT_ERROR = 2


@dataclass(frozen=True)
class ReportConfig:
    """Settings of the command."""

    bundle: Path = setting(Directory(), "the bundle to report on; its report files are replaced", "report")
    dispatch: Path | None = setting(
        ExistingPath(), "a dispatch table measured on a GPU; without it the bundle's own, if any", "report", None
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 written, 2 bad input."""
    try:
        config = read_settings(
            ReportConfig,
            "python -m loka_serve.report",
            "Write report.json and report.html of a bundle again.",
            sys.argv[1:] if arguments is None else arguments,
            os.environ,
        )
        bundle = Bundle.load(config.bundle, verify=False)
        add_files(config.bundle, report_files(config.bundle, bundle.model_name, bundle.engine, config.dispatch))
    except (LokaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    print(config.bundle / PAGE_FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
