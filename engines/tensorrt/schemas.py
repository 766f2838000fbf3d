"""Schemas of the operations of domain `loka`, so that ONNX's checker checks their nodes as it does its own.

What each computes is told in `graph.py`; `operations/` computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import defs

LOKA_DOMAIN, LOKA_VERSION = "loka", 1

_Parameter = defs.OpSchema.FormalParameter
_Option = defs.OpSchema.FormalParameterOption
_Kind = defs.OpSchema.AttrType
FLOATS = ["tensor(bfloat16)", "tensor(float16)", "tensor(float)"]
STORED = [*FLOATS, "tensor(float8e4m3fn)"]


def register() -> None:
    """Make the schemas known to ONNX in this process; once is enough, again does no harm."""
    if defs.has("MoE", LOKA_DOMAIN):
        return
    integers = {"heads": _Kind.INT, "head_dim": _Kind.INT}
    _register(
        "EmbedContext",
        ["history:I", "lengths:I", "features:I", "weights:W*"],
        ["embedded:T"],
        {"weights": _Kind.STRING},
    )
    _register(
        "RotateKeys",
        ["keys:T", "lengths:I"],
        ["rotated:T"],
        {"groups": _Kind.INT, "head_dim": _Kind.INT, "theta": _Kind.FLOAT},
    )
    _register(
        "BeamAttention",
        ["query:T", "keys:T", "values:T", "lengths:I", "counts:I"],
        ["attended:T"],
        {**integers, "groups": _Kind.INT, "kv_set": _Kind.INT, "theta": _Kind.FLOAT},
    )
    _register(
        "SelfBeamAttention",
        ["qkv:T", "counts:I", "ancestors:I?", "past_keys:T?", "past_values:T?"],
        ["attended:T", "keys:T", "values:T"],
        {**integers, "level": _Kind.INT},
    )
    _register(
        "MoE",
        ["normed:T", "residual:T", "weights:W*"],
        ["total:T"],
        {
            "layer": _Kind.INT,
            "experts": _Kind.INT,
            "experts_per_token": _Kind.INT,
            "activation": _Kind.STRING,
            "weights": _Kind.STRING,
            "recipes": _Kind.STRING,
        },
    )
    before = ["counts:I", "beam_widths:I", "nodes:I?", "scores:F?", "failed:I?", "ancestors:I?"]
    _register(
        "LevelSelect",
        ["logits:F", *before, "first_child:I", "codes:I", "allowed:I", "filtered:I"],
        ["counts:I", "codes:I", "nodes:I", "scores:F", "failed:I", "ancestors:I"],
        {"level": _Kind.INT, "in_sid_order": _Kind.INT},
    )


def _register(
    name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, defs.OpSchema.AttrType]
) -> None:
    """Parameters are `name:TYPE`, with `?` for one that may be left out, `*` for any number of any of the types."""
    constraints = {
        "T": (FLOATS, "activations"),
        "F": (["tensor(float)"], "scores"),
        "I": (["tensor(int32)"], "indices and counts"),
        "W": (STORED, "weights and scales"),
    }
    used = {parameter.partition(":")[2][0] for parameter in (*inputs, *outputs)}
    defs.register_schema(
        defs.OpSchema(
            name,
            LOKA_DOMAIN,
            LOKA_VERSION,
            inputs=[_parameter(text) for text in inputs],
            outputs=[_parameter(text) for text in outputs],
            type_constraints=[(key, types, what) for key, (types, what) in constraints.items() if key in used],
            attributes=[defs.OpSchema.Attribute(key, kind) for key, kind in attributes.items()],
        )
    )


def _parameter(text: str) -> defs.OpSchema.FormalParameter:
    name, _, kind = text.partition(":")
    if kind.endswith("*"):
        return _Parameter(name, kind[0], param_option=_Option.Variadic, is_homogeneous=False, min_arity=0)
    return _Parameter(name, kind[0], param_option=_Option.Optional if kind.endswith("?") else _Option.Single)
