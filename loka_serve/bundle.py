"""The bundle: the directory that the build writes and the server loads, with a checksum for every file.

A bundle holds ``config.json`` (the model), ``plan.json`` (recipe by site), ``weights-*.safetensors``,
``catalog.safetensors``, ``probe.json``, ``gate.json`` and ``bundle.json``, the manifest that names them all. Nothing in
it is code or pickle. This module imports no torch: the API process reads everything but the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka_serve.catalog.catalog import Catalog
from loka_serve.engines.base import EngineLimits
from loka_serve.errors import BundleError, CatalogError, CheckpointError, QuantizationError
from loka_serve.models.config import OneRecV2Config
from loka_serve.mods.names import applied_mods
from loka_serve.quantization.plan import PrecisionPlan

if TYPE_CHECKING:
    import torch

    from loka_serve.models.onerec_v2 import OneRecV2

FORMAT = "loka-bundle"
FORMAT_VERSION = 1
MANIFEST_FILE = "bundle.json"
CONFIG_FILE = "config.json"
PLAN_FILE = "plan.json"
PROBE_FILE = "probe.json"
GATE_FILE = "gate.json"
CATALOG_FILE = "catalog.safetensors"
DISPATCH_FILE = "dispatch.json"
"""Written by `python -m loka_serve.dispatch measure --bundle`; a bundle may be without."""
REQUIRED_FILES = (CONFIG_FILE, PLAN_FILE, PROBE_FILE, GATE_FILE, CATALOG_FILE)


@dataclass(frozen=True, eq=False)
class Bundle:
    """A checked bundle; the weights stay on disk until `load_model`.

    Attributes:
        path: the directory.
        manifest: content of ``bundle.json``.
        config: the model's shape, with its static features and their values.
        plan: recipe of each site.
        catalog: the items that the bundle was built with.
        probe, gate: the evidence that the build left: content of ``probe.json`` and ``gate.json``.
    """

    path: Path
    manifest: Mapping[str, Any]
    config: OneRecV2Config
    plan: PrecisionPlan
    catalog: Catalog
    probe: Mapping[str, Any]
    gate: Mapping[str, Any]

    @property
    def model_name(self) -> str:
        return str(self.manifest["model_name"])

    @property
    def engine(self) -> str:
        """The engine that the bundle was built for."""
        return str(self.manifest["engine"])

    @property
    def mods(self) -> list[str]:
        """Names of the mods that changed the model before it was quantized. Raises BundleError for an unknown form."""
        try:
            return applied_mods(self.manifest["details"].get("mods"))
        except ValueError as error:
            raise BundleError(f'{self.path / MANIFEST_FILE}: "details.mods": {error}') from error

    @property
    def limits(self) -> EngineLimits:
        """The limits to serve with unless the server's settings say otherwise."""
        return EngineLimits(**self.manifest["limits"])

    @property
    def weight_files(self) -> list[Path]:
        return [self.path / name for name in sorted(self.manifest["files"]) if name.startswith("weights-")]

    @classmethod
    def load(cls, path: Path | str, verify: bool = True) -> Bundle:
        """Read and check a bundle.

        Args:
            verify: compare the SHA-256 of every file; without it only that the files are there and have their size.

        Raises:
            BundleError: names the file that is missing, changed, unknown or not as expected.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        _check_files(path, manifest, verify)
        try:
            config = OneRecV2Config.from_dict(_read_json(path / CONFIG_FILE))
            plan = PrecisionPlan.from_dict(_read_json(path / PLAN_FILE))
            catalog = Catalog.load(path / CATALOG_FILE)
        except (CheckpointError, QuantizationError, CatalogError) as error:
            raise BundleError(f"{path}: {error}") from error
        probe, gate = _read_json(path / PROBE_FILE), _read_json(path / GATE_FILE)
        return cls(path, manifest, config, plan, catalog, probe, gate)

    def load_model(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        cache_weight: bool = True,
    ) -> OneRecV2:
        """The model with each site's method in place; one tensor at a time is in memory twice.

        Args:
            dtype: of activations, embeddings and norms between the sites; float32 if None.
            cache_weight: see `loka_serve.quantization.recipes.Recipe.prepare`.

        Raises:
            BundleError: names a tensor that is missing, unknown or misshapen.
        """
        from loka_serve.bundle_weights import load_weights

        return load_weights(self.weight_files, self.config, self.plan, device, dtype, cache_weight)


def write_manifest(
    directory: Path, model_name: str, engine: str, limits: EngineLimits, details: Mapping[str, Any]
) -> None:
    """Complete a bundle: ``bundle.json`` with the size and SHA-256 of every other file of the directory."""
    files = sorted(entry.name for entry in directory.iterdir() if entry.name != MANIFEST_FILE)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model_name": model_name,
        "engine": engine,
        "limits": asdict(limits),
        "details": dict(details),
        "files": {
            name: {"bytes": (directory / name).stat().st_size, "sha256": _sha256(directory / name)} for name in files
        },
    }
    (directory / MANIFEST_FILE).write_bytes(_manifest_bytes(manifest))


def add_files(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Add files to a finished bundle, or replace them, and list them in its manifest; the others stay as they are.

    Raises:
        BundleError: not a bundle, or one whose manifest was changed.
        OSError: it cannot be written to.
    """
    manifest = _read_manifest(directory)
    files = dict(manifest["files"])
    for name, content in contents.items():
        _replace(directory / name, content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["files"] = dict(sorted(files.items()))
    _replace(directory / MANIFEST_FILE, _manifest_bytes(manifest))


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write one of the bundle's JSON files. NaN and infinity, which JSON lacks, must have become null before."""
    path.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")


@contextmanager
def staging_directory(target: Path) -> Iterator[Path]:
    """A directory beside `target` to build a bundle in before `publish`; what is left of it at the end is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.parent / f".{target.name}.building-{secrets.token_hex(8)}"
    try:  # the name is known before the directory is there, so that an interrupt at any time finds it
        stage.mkdir(mode=0o700)
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, target: Path) -> None:
    """Move a finished bundle into place; a bundle that was there is moved aside first and removed last.

    Raises:
        BundleError: `target` exists and is neither an empty directory nor a bundle, which alone may be replaced.
    """
    check_replaceable(target)
    stage.chmod(0o755)  # while it is built, it is its owner's alone
    if not target.exists():
        os.rename(stage, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
    os.rename(target, aside / target.name)
    try:
        os.rename(stage, target)
    except BaseException:
        os.rename(aside / target.name, target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def check_replaceable(target: Path) -> None:
    """Raises BundleError if writing a bundle to `target` would destroy anything but an older bundle."""
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise BundleError(f"{target}: exists and is not a directory: expected a new path or an older bundle")
    if any(target.iterdir()) and not _is_bundle(target):
        raise BundleError(f"{target}: holds files that are no bundle: expected a new path or an older bundle")


def _is_bundle(directory: Path) -> bool:
    try:
        return _read_json(directory / MANIFEST_FILE).get("format") == FORMAT
    except BundleError:
        return False


def _manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The one form of a manifest, its own checksum included: any changed byte, white space too, is another form."""
    plain = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**plain, "sha256": digest}, indent=2) + "\n").encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    if not file.is_file():
        raise BundleError(f"{path}: not a bundle: expected a directory with {MANIFEST_FILE}")
    manifest = _read_json(file)
    if manifest.get("format") != FORMAT:
        raise BundleError(f'{file}: "format" is {manifest.get("format")!r}: expected {FORMAT!r}')
    if manifest.get("format_version") != FORMAT_VERSION:
        raise BundleError(
            f"{file}: format version {manifest.get('format_version')!r} is not supported: expected {FORMAT_VERSION}; "
            "build the bundle again"
        )
    try:
        written = _manifest_bytes(manifest)
    except RecursionError:  # writing nests deeper than reading did
        raise BundleError(f"{file}: not JSON: nested too deeply") from None
    if file.read_bytes() != written:
        raise BundleError(f"{file}: changed since it was written: its checksum does not fit")
    return manifest


def _check_files(path: Path, manifest: Mapping[str, Any], verify: bool) -> None:
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    for name in REQUIRED_FILES:
        if name not in files:
            raise BundleError(f"{path / MANIFEST_FILE}: does not list {name}")
    for name, entry in files.items():
        file = path / name
        if Path(name).name != name:
            raise BundleError(f"{path / MANIFEST_FILE}: file name {name!r} leads out of the bundle")
        if not file.is_file():
            raise BundleError(f"{file}: missing")
        if file.stat().st_size != entry["bytes"]:
            raise BundleError(f"{file}: {file.stat().st_size} bytes: expected {entry['bytes']}")
        if verify and _sha256(file) != entry["sha256"]:
            raise BundleError(f"{file}: changed since it was written: its SHA-256 does not fit")
    for file in sorted(path.glob("*.safetensors")):
        if file.name not in files:
            raise BundleError(f"{file}: not part of the bundle: {MANIFEST_FILE} does not list it")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BundleError(f"{path}: not JSON: {error}") from error
    except RecursionError:
        raise BundleError(f"{path}: not JSON: nested too deeply") from None
    if not isinstance(values, dict):
        raise BundleError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values
