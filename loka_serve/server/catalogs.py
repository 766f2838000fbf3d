"""The live catalog and the one before it: replaced between two batches, never within one.

A request is resolved against the catalog that is live when it is decoded and keeps it to the end: its batch names the
version, and the engine process swaps when a batch names another one than the batch before. Before a catalog goes live
the engine has swapped to it once, between two batches: one that it cannot take is refused while the live one serves on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from loka_serve.catalog.catalog import Catalog
from loka_serve.errors import CatalogError
from loka_serve.server.batcher import RETRY_SECONDS, Batcher
from loka_serve.server.catalog_compiler import REFUSED_STATUS
from loka_serve.server.engine_client import EngineClient, EngineRefusal
from loka_serve.server.engine_connection import EngineFailure
from loka_serve.server.metrics import ServerMetrics
from loka_serve.server.problems import CONFLICT, INTERNAL, INVALID, UNAVAILABLE, ProblemError, invalid

logger = logging.getLogger(__name__)

PARQUET_MAGIC = b"PAR1"
IN_USE_POLL_SECONDS = 0.05


class CatalogStore:
    """Keeps the live catalog and what a rollback needs.

    Args:
        catalog: the bundle's own, live at first.
        codebook_sizes: the model's.
    """

    def __init__(
        self,
        catalog: Catalog,
        codebook_sizes: Sequence[int],
        engine: EngineClient,
        batcher: Batcher,
        metrics: ServerMetrics,
    ) -> None:
        compute_lookups(catalog)
        self.live = catalog
        self.previous: Catalog | None = None
        self._incoming: Catalog | None = None
        self._own_version = catalog.version
        self._codebook_sizes = tuple(codebook_sizes)
        self._engine = engine
        self._batcher = batcher
        self._metrics = metrics
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self._retirements: set[asyncio.Task[None]] = set()
        self._directory: Path | None = None
        metrics.set_catalog(catalog.version, catalog.item_count)
        for outcome in ("ok", INVALID.outcome, CONFLICT.outcome):
            metrics.catalog_swaps.labels(outcome)

    def new_file(self) -> Path:
        """A path for an upload, in a directory that only this user may enter."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="loka-catalogs-"))
        return self._directory / f"upload-{next(self._numbers)}"

    def close(self) -> None:
        """Remove the files of catalogs that came over HTTP."""
        for task in self._retirements:
            task.cancel()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def replace(self, upload: Path) -> None:
        """Make an uploaded JSONL or Parquet file the live catalog; the live one serves on until then.

        Raises:
            ProblemError: 422 with the line and field that is wrong, 409 during another update or with the reason why
                the engine does not take it, 503 without an engine.
        """
        async with self._one_at_a_time():
            target = upload.with_suffix(".safetensors")
            await self._compile(upload, target)
            catalog = await asyncio.to_thread(self._load, target)
            if catalog.version == self.live.version:
                target.unlink()
                return
            if self.previous is not None and catalog.version == self.previous.version:
                target.unlink()
                await self._swap_engine(catalog.version)
            else:
                await self._hand_to_engine(catalog, target)
            self._go_live(catalog)

    async def roll_back(self) -> None:
        """Make the catalog before the live one live again.

        Raises:
            ProblemError: 409 if there is none, during another update, or with the reason why the engine does not take
                it, 503 without an engine.
        """
        async with self._one_at_a_time():
            if self.previous is None:
                raise ProblemError(CONFLICT, "there is no catalog to roll back to")
            previous = self.previous
            await self._swap_engine(previous.version)
            self._go_live(previous)

    @contextlib.asynccontextmanager
    async def _one_at_a_time(self) -> AsyncIterator[None]:
        if self._lock.locked():
            raise ProblemError(CONFLICT, "another catalog update is under way", retry_after=RETRY_SECONDS)
        async with self._lock:
            try:
                yield
            except ProblemError as error:
                self._metrics.catalog_swaps.labels(error.kind.outcome).inc()
                raise
            self._metrics.catalog_swaps.labels("ok").inc()

    async def _compile(self, upload: Path, target: Path) -> None:
        with upload.open("rb") as file:
            is_parquet = file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
        # A relative name: messages about the file must not show where it lies.
        source = upload.rename(upload.with_name("catalog.parquet" if is_parquet else "catalog.jsonl"))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "loka_serve.server.catalog_compiler", source.name, target.name),
                *map(str, self._codebook_sizes),
                cwd=source.parent,
                stdout=asyncio.subprocess.PIPE,
            )
            try:
                output, _ = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        finally:
            source.unlink(missing_ok=True)
        if process.returncode == REFUSED_STATUS:
            raise invalid("body", output.decode(errors="replace").strip())
        if process.returncode != 0:
            logger.error("the catalog compiler ended with status %d", process.returncode)
            raise ProblemError(INTERNAL, "the catalog could not be compiled")

    def _load(self, target: Path) -> Catalog:
        try:
            catalog = Catalog.load(target)
            compute_lookups(catalog)
            return catalog
        except CatalogError as error:
            logger.error("a catalog that was just compiled cannot be read: %s", error)
            raise ProblemError(INTERNAL, "the catalog could not be compiled") from None

    async def _hand_to_engine(self, catalog: Catalog, target: Path) -> None:
        self._incoming = catalog
        try:
            try:
                await self._engine.load_catalog(catalog.version, str(target))
            except EngineFailure as failure:
                raise self._not_taken(catalog.version, failure) from None
            await self._swap_engine(catalog.version)
        except BaseException:  # or the client went away
            self._incoming = None
            if self._engine.extra_catalogs.get(catalog.version) != str(target):
                target.unlink(missing_ok=True)
            self._start_retirement(catalog.version)
            raise
        self._incoming = None

    async def _swap_engine(self, version: str) -> None:
        try:
            await self._engine.swap_catalog(version)
        except EngineRefusal as refusal:
            detail = f"the engine does not take the catalog: {refusal}; the live one is unchanged"
            raise ProblemError(CONFLICT, detail) from None
        except EngineFailure as failure:
            raise self._not_taken(version, failure) from None

    def _not_taken(self, version: str, failure: EngineFailure) -> ProblemError:
        logger.error("the engine did not take catalog %s: %s", version, failure)
        detail = "the engine did not take the catalog; the live one is unchanged"
        return ProblemError(UNAVAILABLE, detail, retry_after=RETRY_SECONDS)

    def _go_live(self, catalog: Catalog) -> None:
        retired = self.previous
        self.live, self.previous = catalog, self.live
        self._engine.live_catalog = catalog.version
        self._metrics.set_catalog(catalog.version, catalog.item_count)
        logger.info("catalog %s is live: %d items", catalog.version, catalog.item_count)
        if retired is not None and retired.version != catalog.version:
            self._start_retirement(retired.version)

    def _start_retirement(self, version: str) -> None:
        task = asyncio.create_task(self._retire(version))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _retire(self, version: str) -> None:
        """Forget a catalog once no request uses it; the bundle's own stays, as a new engine process starts with it."""
        while version in self._batcher.versions_in_use():
            await asyncio.sleep(IN_USE_POLL_SECONDS)
        kept = (self.live, self.previous, self._incoming)
        if version == self._own_version or version in [catalog.version for catalog in kept if catalog is not None]:
            return
        path = self._engine.extra_catalogs.get(version)
        self._engine.drop_catalog(version)
        if path is not None:
            Path(path).unlink(missing_ok=True)


def compute_lookups(catalog: Catalog) -> None:
    """Compute now what a catalog would compute at its first use, so that no request pays for it."""
    catalog.index_of("")
    catalog.semantic_ids([0])
