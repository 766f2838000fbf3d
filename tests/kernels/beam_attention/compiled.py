"""Machine code of a Triton kernel for Hopper, looked at without a GPU: registers, spills, instructions by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MachineCode:
    """What a compiled kernel consists of.

    Attributes:
        registers: of a thread.
        stack: bytes a thread keeps in local memory, spills among them.
        shared_memory: bytes of a program.
        instructions: how often each instruction stands in the whole kernel.
        loop: the same for its shortest loop that holds matrix instructions and most exponentials; empty without one.
    """

    registers: int
    stack: int
    shared_memory: int
    instructions: Counter[str]
    loop: Counter[str]


def machine_code(kernel: Any, variants: list[dict[str, Any]]) -> list[MachineCode]:
    """Compile each variant for sm_90a and disassemble it with the tools that Triton brings.

    A variant holds `signature` (types of the arguments, pointers and strides taken as multiples of 16 as they are at
    run time), `constants` and compiler `options`. All runs in a process of its own: a kernel that was decorated for
    the interpreter cannot be compiled.
    """
    script = textwrap.dedent(
        f"""
        import importlib, json, re, subprocess, tempfile
        from collections import Counter
        from pathlib import Path
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        kernel = getattr(importlib.import_module({kernel.fn.__module__!r}), {kernel.fn.__name__!r})
        cuobjdump = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
        instruction = re.compile(r"^\\s+/\\*([0-9a-f]{{4,}})\\*/\\s+(?:@!?U?P\\w+ )?([A-Z0-9]+)(.*)", re.M)

        def shortest_loop(code):
            best = None
            exponentials = sum(name == "MUFU" for _, name, _ in code)
            for at, name, rest in code:
                target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" else None
                if target and int(target[1], 16) < at:
                    body = [name for place, name, _ in code if int(target[1], 16) <= place <= at]
                    products = any(name.endswith("MMA") for name in body)
                    if products and body.count("MUFU") > exponentials / 2 and (not best or len(body) < len(best)):
                        best = body
            return best or []

        for variant in {variants!r}:
            types = variant["signature"] | dict.fromkeys(variant["constants"], "constexpr")
            names = kernel.arg_names
            aligned = [
                place for place, name in enumerate(names) if types[name].startswith("*") or name.endswith("stride")
            ]
            source = ASTSource(
                kernel,
                {{name: types[name] for name in names}},
                {{(names.index(name),): value for name, value in variant["constants"].items()}},
                {{(place,): [["tt.divisibility", 16]] for place in aligned}},
            )
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=variant["options"])
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(compiled.asm["cubin"])
                file.flush()
                usage, text = (
                    subprocess.run([cuobjdump, flag, file.name], capture_output=True, text=True, check=True).stdout
                    for flag in ("-res-usage", "-sass")
                )
            code = [(int(at, 16), name, rest) for at, name, rest in instruction.findall(text)]
            print(json.dumps({{
                "registers": int(re.search(r"REG:(\\d+)", usage)[1]),
                "stack": int(re.search(r"STACK:(\\d+)", usage)[1]),
                "shared_memory": compiled.metadata.shared,
                "instructions": Counter(name for _, name, _ in code),
                "loop": Counter(shortest_loop(code)),
            }}))
        """
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [
        MachineCode(**fields | {key: Counter(fields[key]) for key in ("instructions", "loop")})
        for fields in map(json.loads, result.stdout.splitlines())
    ]
