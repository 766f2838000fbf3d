"""Configuration of the `onerec_v2` model and its presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loka_serve.errors import CheckpointError

MODEL_TYPE = "onerec_v2"
POSITION_ENCODINGS = ("recency", "rotary")


@dataclass(frozen=True)
class FeatureConfig:
    """One categorical, static user feature. Index 0 stands for "missing or unknown"; value i has index i + 1."""

    name: str
    values: tuple[str, ...]

    def index_of(self, value: str) -> int:
        try:
            return self.values.index(value) + 1
        except ValueError:
            return 0


@dataclass(frozen=True)
class OneRecV2Config:
    """Shape of a OneRec-V2 lazy decoder (arXiv 2508.20900, section 2) with sparse-MoE blocks (arXiv 2603.11486).

    Attributes:
        heads: query heads of width `head_dim`; d_model need not equal heads * head_dim.
        kv_groups: G_kv, key/value heads of the context; divides `heads`.
        kv_layers: L_kv, distinct key/value sets; decoder layer l reads set floor(l * L_kv / layers).
        kv_split: S_kv, 1 when keys serve as values, 2 when they are projected apart.
        d_ff: inner width of the dense SwiGLU blocks.
        first_dense_layers: leading layers whose feed-forward is dense although experts > 0.
        experts: routed experts a sparse layer holds; 0 makes every layer dense.
        codebook_sizes: codes of each SID level; its length is the number of levels (2..5).
        max_context: longest history, in items.
        beam_width: default beams of a request.
        position_encoding: `recency` adds a learned vector by distance from the newest item; `rotary` turns queries and
            keys by their position (arXiv 2104.09864), so that one context serves targets at several times.
        short_term_length: items at the history's end that get the short-term segment vector; 0 for one pathway.
        features: static user features, embedded into the context's first position.
    """

    d_model: int
    layers: int
    heads: int
    head_dim: int = 128
    kv_groups: int = 1
    kv_layers: int = 1
    kv_split: int = 1
    d_ff: int = 0
    first_dense_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    shared_experts: int = 0
    codebook_sizes: tuple[int, ...] = (8192, 8192, 8192)
    max_context: int = 3000
    beam_width: int = 512
    position_encoding: str = "recency"
    rotary_theta: float = 10000.0
    short_term_length: int = 0
    features: tuple[FeatureConfig, ...] = ()
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        def require(condition: bool, field: str, expected: str) -> None:
            if not condition:
                raise CheckpointError(f"config {field} = {getattr(self, field)!r}: expected {expected}")

        for field in ("d_model", "layers", "heads", "head_dim", "kv_groups", "kv_layers", "max_context", "beam_width"):
            value = getattr(self, field)
            require(isinstance(value, int) and not isinstance(value, bool) and value > 0, field, "a positive integer")
        require(self.heads % self.kv_groups == 0, "kv_groups", f"a divisor of heads = {self.heads}")
        require(self.kv_layers <= self.layers, "kv_layers", f"at most layers = {self.layers}")
        require(self.kv_split in (1, 2), "kv_split", "1 (keys are the values) or 2")
        require(2 <= len(self.codebook_sizes) <= 5, "codebook_sizes", "2 to 5 levels")
        require(all(size > 0 for size in self.codebook_sizes), "codebook_sizes", "positive sizes")
        require(self.position_encoding in POSITION_ENCODINGS, "position_encoding", f"one of {POSITION_ENCODINGS}")
        require(self.rotary_theta > 0, "rotary_theta", "a positive number")
        require(
            self.head_dim % 2 == 0 or self.position_encoding != "rotary", "head_dim", "an even number (rotary pairs)"
        )
        require(0 <= self.short_term_length <= self.max_context, "short_term_length", "0 to max_context")
        require(0 <= self.first_dense_layers <= self.layers, "first_dense_layers", "0 to layers")
        if self.experts:
            require(1 <= self.experts_per_token <= self.experts, "experts_per_token", f"1 to experts = {self.experts}")
            require(self.expert_width > 0, "expert_width", "a positive integer when experts > 0")
            require(self.shared_experts >= 0, "shared_experts", "0 or more")
        if not self.experts or self.first_dense_layers:
            require(self.d_ff > 0, "d_ff", "a positive integer when a layer is dense")

    @property
    def levels(self) -> int:
        """Number of SID levels L, which is also the number of decode steps."""
        return len(self.codebook_sizes)

    @property
    def d_context(self) -> int:
        """Width of a projected context position: S_kv * L_kv * G_kv * head_dim."""
        return self.kv_split * self.kv_layers * self.kv_groups * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer `layer` has a mixture of experts."""
        return self.experts > 0 and layer >= self.first_dense_layers

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` form."""
        return {"model_type": MODEL_TYPE, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OneRecV2Config:
        """Inverse of `to_dict`.

        Raises:
            CheckpointError: another model type, an unknown or missing key, a value of the wrong kind.
        """
        values = dict(values)
        model_type = values.pop("model_type", None)
        if model_type != MODEL_TYPE:
            raise CheckpointError(f'config "model_type" is {model_type!r}: expected "{MODEL_TYPE}"')
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise CheckpointError(f"config has unknown keys {unknown}: expected a subset of {sorted(known)}")
        try:
            if "codebook_sizes" in values:
                values["codebook_sizes"] = tuple(int(size) for size in values["codebook_sizes"])
            if "features" in values:
                values["features"] = tuple(
                    FeatureConfig(str(feature["name"]), tuple(str(value) for value in feature["values"]))
                    for feature in values["features"]
                )
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"config cannot be read: {error}") from error


PRESETS: dict[str, OneRecV2Config] = {
    "onerec-v2-4b-a0.5b": OneRecV2Config(
        d_model=1408,
        layers=14,
        heads=11,
        kv_groups=11,
        d_ff=3840,
        first_dense_layers=2,
        experts=53,
        experts_per_token=3,
        expert_width=1408,
        shared_experts=1,
    ),
    "onerec-v2-1b": OneRecV2Config(d_model=1792, layers=18, heads=14, kv_groups=14, d_ff=5888),
    "tiny": OneRecV2Config(
        d_model=64,
        layers=3,
        heads=4,
        head_dim=16,
        kv_groups=2,
        kv_layers=2,
        kv_split=2,
        d_ff=128,
        first_dense_layers=1,
        experts=8,
        experts_per_token=2,
        expert_width=64,
        shared_experts=1,
        codebook_sizes=(256, 256, 256),
        max_context=64,
        beam_width=16,
    ),
}
