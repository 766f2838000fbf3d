"""The real API process before the scripted engine: `python -m tests.server.scripted_server CATALOG [ARGS] -- FLAGS`."""

from __future__ import annotations

import sys
from pathlib import Path

from loka_serve.catalog.catalog import Catalog
from loka_serve.config import ServerConfig
from loka_serve.models.config import FeatureConfig, OneRecV2Config
from loka_serve.server.lifecycle import listen, run
from loka_serve.server.log import configure_logging
from loka_serve.server.resolution import ServedModel
from loka_serve.server.state import build_state

CODEBOOK_SIZES = (256, 16, 16)
FEATURES = (FeatureConfig("age", ("young", "old")), FeatureConfig("region", ("north", "south")))


def make_catalog(items: int = 60, prefix: str = "item") -> Catalog:
    """Two items on every fifth semantic ID; `kind` is even or odd, `price` a number, `tags` a list."""
    leaves = [index - index // 5 for index in range(items)]
    return Catalog.build(
        item_ids=[f"{prefix}-{index}" for index in range(items)],
        semantic_ids=[[leaf // 16, leaf % 16, leaf % 7] for leaf in leaves],
        popularity=[float(items - index) for index in range(items)],
        attributes={
            "kind": ["even" if index % 2 == 0 else "odd" for index in range(items)],
            "price": [index * 0.5 if index % 10 else None for index in range(items)],
            "tags": [["all", f"tag-{index % 3}"] for index in range(items)],
        },
        codebook_sizes=CODEBOOK_SIZES,
    )


def make_model(max_batch: int = 8) -> ServedModel:
    """Three levels, at most 64 beams and 50 history items, two features."""
    shape = {"d_model": 8, "layers": 1, "heads": 1, "d_ff": 8}
    config = OneRecV2Config(**shape, codebook_sizes=CODEBOOK_SIZES, max_context=50, beam_width=16, features=FEATURES)
    return ServedModel("scripted", config, max_batch=max_batch, max_beam_width=64, max_context=50, beam_width=16)


def main() -> int:
    """Serve until told to stop."""
    split = sys.argv.index("--")
    catalog_file, *engine_arguments = sys.argv[1:split]
    directory = str(Path(catalog_file).parent)
    config = ServerConfig.from_command_line(["--bundle", directory, "--port", "0", *sys.argv[split + 1 :]], {})
    configure_logging(config.log_level, "api", config.log_format)
    model = make_model(config.max_batch or 8)
    engine = [sys.executable, "-m", "tests.server.scripted_engine", "--catalog", catalog_file]
    command = [*engine, "--max-batch", str(model.max_batch), *engine_arguments]
    return run(build_state(config, model, Catalog.load(catalog_file), command), listen(config))


if __name__ == "__main__":
    sys.exit(main())
