"""What a training run depends on, and the model that its options describe."""

from __future__ import annotations

from dataclasses import dataclass

from loka_serve.models.config import OneRecV2Config


@dataclass(frozen=True)
class Options:
    """Everything that the result depends on; each field is a command line option.

    max_context: 47 items and the static slot make 48, a multiple of 8, which attention kernels like.
    rows: targets of one step.
    history_dropout: probability of each history item to be left out while training.
    legality_weight: as in `examples.groceries.objective.Options`.
    beam: of the validation, before the history is taken out.
    """

    seed: int = 1
    d_model: int = 128
    layers: int = 3
    heads: int = 4
    head_dim: int = 32
    kv_groups: int = 4
    kv_layers: int = 3
    experts: int = 4
    expert_width: int = 128
    max_context: int = 47
    epochs: int = 40
    rows: int = 1024
    learning_rate: float = 3e-3
    warmup: float = 0.03
    weight_decay: float = 0.05
    dropout: float = 0.2
    context_dropout: float = 0.2
    history_dropout: float = 0.1
    legality_weight: float = 0.3
    embedding_scale: float = 0.1
    average_decay: float = 0.998
    balance_rate: float = 1e-3
    beam: int = 32


def model_config(options: Options, codebook_sizes: tuple[int, ...]) -> OneRecV2Config:
    """The architecture that the options describe."""
    return OneRecV2Config(
        d_model=options.d_model,
        layers=options.layers,
        heads=options.heads,
        head_dim=options.head_dim,
        kv_groups=options.kv_groups,
        kv_layers=options.kv_layers,
        kv_split=2,
        experts=options.experts,
        experts_per_token=2,
        expert_width=options.expert_width,
        shared_experts=1,
        codebook_sizes=codebook_sizes,
        max_context=options.max_context,
        beam_width=64,
        position_encoding="rotary",
    )
