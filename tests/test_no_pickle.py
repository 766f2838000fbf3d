"""No code of ours touches pickles, which run whatever code they name: weights are safetensors, messages msgpack.

The one exception reads tensors that torch has saved, with torch's own reader that knows nothing but tensors.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "jsonpickle",
    "multiprocessing",
}
TENSOR_READER = "loka_serve/catalog/readers/tensor.py"
CALLS = {"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle", "load_pickle", "unsafe_load", "full_load"}
LOADERS = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("joblib", "load")}
NUMPY_LOADERS = {("np", "load"), ("numpy", "load")}


def findings(source: str) -> list[str]:
    """What in a file could touch a pickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            holder = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            call = (holder, node.func.attr)
            without = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe_numpy = call in NUMPY_LOADERS and without.get("allow_pickle", "False") != "False"
            if call == ("torch", "load") and without.get("weights_only") == "True":
                found.append("torch.load(weights_only=True)")
            elif call in LOADERS or node.func.attr in CALLS or unsafe_numpy:
                found.append(ast.unparse(node.func))
    return found


def sources() -> list[Path]:
    return [path for folder in ("loka_serve", "kernels", "engines") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_source_touches_a_pickle() -> None:
    assert len(sources()) > 100
    found = {str(path.relative_to(ROOT)): findings(path.read_text()) for path in sources()}
    assert {path: what for path, what in found.items() if what} == {TENSOR_READER: ["torch.load(weights_only=True)"]}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load(path)", "np.load(f, allow_pickle=True)",
        "import a, marshal", "socket.recv_pyobj()", "import multiprocessing.connection", "frame.to_pickle('x')",
    ],
)  # fmt: skip
def test_what_would_is_found(source: str) -> None:
    assert findings(source)


@pytest.mark.parametrize("source", ["import json", "np.load(f)", "np.load(f, allow_pickle=False)", "model.load(path)"])
def test_what_would_not_is_left_alone(source: str) -> None:
    assert not findings(source)
