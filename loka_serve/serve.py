"""`python -m loka_serve.serve --bundle DIR`: serve a bundle over HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from loka_serve.bundle import Bundle
from loka_serve.config import ServerConfig
from loka_serve.errors import LokaError
from loka_serve.server.lifecycle import listen, run
from loka_serve.server.log import configure_logging
from loka_serve.server.state import build_state, engine_command, served_model, with_tuned


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it is told to stop; returns the exit status."""
    try:
        config = ServerConfig.from_command_line(sys.argv[1:] if arguments is None else arguments, os.environ)
        configure_logging(config.log_level, "api", config.log_format)
        listener = listen(config)
        # The engine process compares the checksums of all files; here only the small ones are read.
        bundle = Bundle.load(config.bundle, verify=False)
        config = with_tuned(config, bundle)
        model = served_model(config, bundle)
        state = build_state(config, model, bundle.catalog, engine_command(config, bundle, model))
    except LokaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run(state, listener)


if __name__ == "__main__":
    sys.exit(main())
