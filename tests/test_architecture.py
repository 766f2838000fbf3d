"""Dependencies point one way, and the packages hold what pyproject.toml says."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package may import from these and from itself.
ALLOWED = {
    "kernels": set(),
    "errors": set(),
    "client": set(),
    "catalog": {"errors"},
    "models": {"errors", "kernels"},
    "decoding": {"errors", "kernels", "models", "catalog"},
    "quantization": {"errors", "kernels", "models", "tensor_files"},
    "probe": {"errors", "kernels", "models", "catalog", "decoding", "quantization", "engines"},
    "drift": {"errors", "models", "catalog", "quantization", "probe", "engines"},
    "mods": {"errors", "models", "quantization", "probe"},
    "engines": {"errors", "kernels", "models", "catalog", "decoding", "quantization", "bundle", "tensor_files"},
}


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "loka_serve" else parts[0]


def imports_of(path: Path) -> set[str]:
    """First component below loka_serve of every import in a file, those inside functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = (
                [node.module] if node.module != "loka_serve" else [f"loka_serve.{name.name}" for name in node.names]
            )
        elif isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        else:
            continue
        names |= {module.split(".")[1] for module in modules if module.startswith("loka_serve.")}
    return names


def sources() -> list[Path]:
    return [path for folder in ("loka_serve", "kernels", "engines") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    package = package_of(path)
    if package in ALLOWED:
        assert imports_of(path) - {package} <= ALLOWED[package]
    if package not in ("server", "serve", "tune", "tuning"):
        assert "server" not in imports_of(path)


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        if folder == "loka_serve"
        else ".".join(("loka_serve", *path.parent.relative_to(ROOT).parts))
        for folder in ("loka_serve", "kernels", "engines")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert found == listed


def test_what_the_api_process_needs_does_not_load_torch() -> None:
    modules = ("engines", "engines.base", "decoding.expansion", "catalog.readers", "server.app", "bundle")
    imports = ", ".join(f"loka_serve.{module}" for module in modules)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_stay_readable_in_one_sitting() -> None:
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in long.items() if lines > 350} == {}
