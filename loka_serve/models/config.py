"""Configuration of the `onerec_v2` model and its presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loka_serve.errors import CheckpointError

MODEL_TYPE = "onerec_v2"
POSITION_ENCODINGS = ("recency", "rotary")
WORDS: dict[str, tuple[str, ...]] = {
    "position_encoding": POSITION_ENCODINGS,
    "norm": ("rms", "block"),
    "activation": ("silu", "hard_swish"),
}
"""What every field that is one of a few words may be."""
SHOWN_CHARACTERS = 100

# Far beyond any model that could be served, and small enough that no shape overflows and no loop seems to hang.
LARGEST_WIDTH = 1 << 20
LARGEST_CODEBOOK = 1 << 24
INTEGERS: dict[str, tuple[int, int]] = {
    "d_model": (1, LARGEST_WIDTH),
    "layers": (1, 1024),
    "heads": (1, 4096),
    "head_dim": (1, 4096),
    "kv_groups": (1, 4096),
    "kv_layers": (1, 1024),
    "kv_split": (1, 2),
    "d_ff": (0, LARGEST_WIDTH),
    "first_dense_layers": (0, 1024),
    "experts": (0, 65_536),
    "experts_per_token": (0, 65_536),
    "expert_width": (0, LARGEST_WIDTH),
    "shared_experts": (0, 1024),
    "max_context": (1, 1 << 20),
    "beam_width": (1, 65_536),
    "short_term_length": (0, 1 << 20),
}
"""Least and largest value of every field that is an integer."""
NUMBERS: dict[str, tuple[float, float]] = {
    "rotary_theta": (1.0, 1e12),
    "norm_eps": (1e-12, 1.0),  # below it, float32 would lose it beside a row of zeros
}
"""Least and largest value of every field that is a real number."""


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
        norm: `rms` is an RMSNorm with gains; `block` the parameter-free BlockNorm of LoKA (arXiv 2605.10886).
        activation: of the feed-forward's gate: `silu`, or `hard_swish`, x * relu6(x + 3) / 6.
        linear_bias: attention and dense feed-forward linears (shared experts too) carry a bias.
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
    norm: str = "rms"
    activation: str = "silu"
    linear_bias: bool = False

    def __post_init__(self) -> None:
        for field, (low, high) in INTEGERS.items():
            value = getattr(self, field)
            # Exactly int: neither a boolean nor a float that happens to be whole is a size.
            self._require(type(value) is int and low <= value <= high, field, f"an integer from {low} to {high}")
        for field, (least, most) in NUMBERS.items():
            value = getattr(self, field)
            # NaN fails the comparison.
            in_range = type(value) in (int, float) and least <= value <= most
            self._require(in_range, field, f"a number from {least:g} to {most:g}")
        for field, words in WORDS.items():
            value = getattr(self, field)
            self._require(type(value) is str and value in words, field, f"one of {', '.join(words)}")
        self._require(type(self.linear_bias) is bool, "linear_bias", "true or false")
        sizes = self.codebook_sizes
        self._require(
            isinstance(sizes, tuple)
            and 2 <= len(sizes) <= 5
            and all(type(size) is int and 1 <= size <= LARGEST_CODEBOOK for size in sizes),
            "codebook_sizes",
            f"2 to 5 integers from 1 to {LARGEST_CODEBOOK}",
        )
        self._check_relations()
        _check_features(self.features)

    def _check_relations(self) -> None:
        """What fields demand of each other."""
        self._require(self.heads % self.kv_groups == 0, "kv_groups", f"a divisor of heads = {self.heads}")
        self._require(self.kv_layers <= self.layers, "kv_layers", f"at most layers = {self.layers}")
        self._require(
            self.head_dim % 2 == 0 or self.position_encoding != "rotary", "head_dim", "an even number (rotary pairs)"
        )
        self._require(self.short_term_length <= self.max_context, "short_term_length", "0 to max_context")
        self._require(self.first_dense_layers <= self.layers, "first_dense_layers", "0 to layers")
        if self.experts:
            self._require(
                1 <= self.experts_per_token <= self.experts, "experts_per_token", f"1 to experts = {self.experts}"
            )
            self._require(self.expert_width > 0, "expert_width", "a positive integer when experts > 0")
        if not self.experts or self.first_dense_layers:
            self._require(self.d_ff > 0, "d_ff", "a positive integer when a layer is dense")

    def _require(self, condition: bool, field: str, expected: str) -> None:
        if not condition:
            raise _unexpected(field, getattr(self, field), expected)

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
            raise CheckpointError(f'config "model_type" is {_shown(model_type)}: expected "{MODEL_TYPE}"')
        fields = dataclasses.fields(cls)
        known = {field.name for field in fields}
        unknown = sorted(set(values) - known)
        if unknown:
            raise CheckpointError(f"config has unknown keys {_shown(unknown)}: expected a subset of {sorted(known)}")
        for field in fields:
            if field.name not in values and field.default is dataclasses.MISSING:
                low, high = INTEGERS[field.name]
                raise CheckpointError(f"config {field.name} is missing: expected an integer from {low} to {high}")
        if isinstance(values.get("codebook_sizes"), list):
            values["codebook_sizes"] = tuple(values["codebook_sizes"])
        if "features" in values:
            values["features"] = _parse_features(values["features"])
        return cls(**values)


def _parse_features(value: object) -> tuple[FeatureConfig, ...]:
    """Features from their JSON form; what the texts must be is left to `_check_features`."""
    expected = 'a list of objects {"name": text, "values": [text, ...]}'
    if not isinstance(value, (list, tuple)):
        raise _unexpected("features", value, expected)
    features = []
    for index, entry in enumerate(value):
        if not isinstance(entry, Mapping) or set(entry) != {"name", "values"}:
            raise _unexpected(f"features[{index}]", entry, 'an object {"name": text, "values": [text, ...]}')
        if not isinstance(entry["values"], (list, tuple)):
            raise _unexpected(f"features[{index}].values", entry["values"], "a list of texts")
        features.append(FeatureConfig(entry["name"], tuple(entry["values"])))
    return tuple(features)


def _check_features(features: tuple[FeatureConfig, ...]) -> None:
    if not isinstance(features, tuple) or not all(isinstance(feature, FeatureConfig) for feature in features):
        raise _unexpected("features", features, "a tuple of FeatureConfig")
    _check_texts([(f"features[{index}].name", feature.name) for index, feature in enumerate(features)])
    for index, feature in enumerate(features):
        if not isinstance(feature.values, tuple):
            raise _unexpected(f"features[{index}].values", feature.values, "a tuple of texts")
        _check_texts([(f"features[{index}].values[{place}]", value) for place, value in enumerate(feature.values)])


def _check_texts(texts: Sequence[tuple[str, object]]) -> None:
    """Raises CheckpointError unless the texts, each with its place, are distinct, not empty and valid Unicode."""
    seen = set()
    for place, text in texts:
        if type(text) is not str or not text:
            raise _unexpected(place, text, "a text that is not empty")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair, which a JSON escape may smuggle in
            raise _unexpected(place, text, "valid Unicode text") from None
        if text in seen:
            raise _unexpected(place, text, "distinct texts, it is there twice")
        seen.add(text)


def _unexpected(field: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"config {field} = {_shown(value)}: expected {expected}")


def _shown(value: object) -> str:
    """A value as errors show it: on one line, cut at a length that a person reads."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply; an integer of thousands of digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


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
