"""What a training run depends on: its options, the model that they describe, and the loss."""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from examples.groceries.batches import Batch, feature_configs
from examples.groceries.prepare import Sequences
from examples.groceries.scoring import LegalCodes
from loka_serve.models.config import OneRecV2Config
from loka_serve.models.layers import SparseMoE
from loka_serve.models.onerec_v2 import Block, OneRecV2


class TrainerOptions(Protocol):
    """What `Trainer` and `fresh_model` need to know, of this example or another: a dataclass; see `Options`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def seed(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def dropout(self) -> float: ...
    @property
    def context_dropout(self) -> float: ...
    @property
    def legality_weight(self) -> float: ...
    @property
    def embedding_scale(self) -> float: ...
    @property
    def average_decay(self) -> float: ...
    @property
    def balance_rate(self) -> float: ...


@dataclass(frozen=True)
class Options:
    """Everything that the result depends on; each field is a command line option.

    held_out: baskets at the end of each household that training does not see (2: the test and the validation basket).
    epoch_share: part of the training rows that one epoch draws, for a short fine-tuning with validation in between.
    product_number_share, any_order_share: parts of the training chunks in these modes (see batches.py); the rest
        learns the next basket.
    household_power, basket_power: see `batches.training_weights`.
    legality_weight: weight of -log P(legal codes) in the loss. Served scores are normalised over whole codebooks, so
        that illegal codes must have little probability; 1 is the plain cross-entropy over the codebook. It grows from
        a tenth of this to this over the run, so that which products go together is learned first.
    open_basket_items: 1 adds the feature that says how many items the open basket holds (see contexts.py);
        count_dropout is the part of the training chunks that leave it out all the same.
    """

    seed: int = 1
    held_out: int = 2
    epoch_share: float = 1.0
    d_model: int = 256
    layers: int = 3
    heads: int = 4
    head_dim: int = 64
    kv_groups: int = 4
    kv_layers: int = 3
    first_dense_layers: int = 0
    d_ff: int = 512
    experts: int = 8
    expert_width: int = 128
    max_context: int = 1024
    epochs: int = 12
    rows: int = 16
    chunk: int = 256
    learning_rate: float = 4e-3
    warmup: float = 0.03
    weight_decay: float = 0.05
    dropout: float = 0.1
    context_dropout: float = 0.1
    feature_dropout: float = 0.3
    product_number_share: float = 0.35
    any_order_share: float = 0.3
    household_power: float = 0.0
    basket_power: float = 0.5
    legality_weight: float = 0.3
    embedding_scale: float = 0.1
    average_decay: float = 0.998
    balance_rate: float = 1e-3
    beam: int = 32
    open_basket_items: int = 0
    count_dropout: float = 0.15


def model_config(options: Options, sequences: Sequences) -> OneRecV2Config:
    """The architecture that the options describe, for the data's codebooks and features."""
    return OneRecV2Config(
        d_model=options.d_model,
        layers=options.layers,
        heads=options.heads,
        head_dim=options.head_dim,
        kv_groups=options.kv_groups,
        kv_layers=options.kv_layers,
        kv_split=2,
        d_ff=options.d_ff if options.first_dense_layers else 0,
        first_dense_layers=options.first_dense_layers,
        experts=options.experts,
        experts_per_token=2,
        expert_width=options.expert_width,
        shared_experts=1,
        codebook_sizes=sequences.codebook_sizes,
        max_context=options.max_context,
        beam_width=128,
        position_encoding="rotary",
        features=feature_configs(sequences, bool(options.open_basket_items)),
    )


def fresh_model(config: OneRecV2Config, options: TrainerOptions, device: torch.device) -> OneRecV2:
    """A freshly initialised model, ready to train."""
    model = OneRecV2(config).initialize(options.seed)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.data *= options.embedding_scale
        if isinstance(module, SparseMoE):
            module.dense = device.type == "cuda"  # there a launch costs more than the products that are thrown away
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.dropout.p = options.dropout
    model.context.dropout.p = options.context_dropout
    return model.to(device)


def loss_of(logits: list[Tensor], batch: Batch, legal: LegalCodes, legality_weight: float) -> Tensor:
    """Mean over targets of the sum over levels of -log P(code | legal) - legality_weight * log P(legal)."""
    total = torch.zeros((), device=batch.weights.device)
    for level, level_logits in enumerate(logits):
        codes = batch.targets[..., level]
        allowed = legal.mask(batch.targets[..., :level])
        over_all = level_logits.logsumexp(-1)
        over_legal = level_logits.masked_fill(~allowed, -torch.inf).logsumexp(-1)
        chosen = level_logits.gather(-1, codes[..., None])[..., 0]
        loss = over_legal - chosen + legality_weight * (over_all - over_legal)
        total = total + (loss * batch.weights).sum()
    return total / batch.weights.sum()
