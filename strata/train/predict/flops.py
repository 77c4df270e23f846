"""The arithmetic that a training step calls for; MFU (Chowdhery et al. 2022) is this over time and peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from strata.models.config import ModelConfig
from strata.train.data.pack import PackedBatch
from strata.train.predict.rank_parameters import meta_model


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations, a multiply-add is two. products: of the layers' matrices. attention: scores and the
    mix of values, of the pairs that are seen. head: logits of the tokens that the loss counts.
    """

    products: int = 0
    attention: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return self.products + self.attention + self.head

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(self.products + other.products, self.attention + other.attention, self.head + other.head)


def batch_flops(config: ModelConfig, batches: Iterable[PackedBatch], *, weights_are_frozen: bool = False) -> StepFlops:
    """Forward and backward of these batches; see `document_flops`."""
    each = (
        document_flops(config, batch.lengths, len(batch.targets), weights_are_frozen=weights_are_frozen)
        for batch in batches
    )
    return sum(each, StepFlops())


def document_flops(
    config: ModelConfig, lengths: Sequence[int] | NDArray[np.int32], counted: int, *, weights_are_frozen: bool = False
) -> StepFlops:
    """Forward and backward of documents of these lengths: what the mathematics calls for, however the work is done.

    Products and head: 2 operations an element and token, in three passes (the result, the gradient of the input and
    that of the weight); of experts those a token goes to, and the router. Attention: 2 * heads * (dimensions of a query
    and of a value) a pair, in three passes. What is computed twice to save memory, and whatever is no matrix product,
    does not count.

    counted: the tokens whose successor the loss counts, which alone reach the head. weights_are_frozen: only adapters
    learn (LoRA), so there is no gradient of the matrices; the adapters' own products are left out.
    """
    passes = 2 if weights_are_frozen else 3
    elements = sum(active_elements(config, layer) for layer in range(config.num_layers))
    windows = Counter(window for window, attends in zip(config.windows, config.attends, strict=True) if attends)
    pairs = sum(layers * visible_pairs(lengths, window) for window, layers in windows.items())
    return StepFlops(
        products=2 * passes * elements * int(np.sum(lengths, dtype=np.int64)),
        attention=6 * config.num_heads * (config.head_dim + config.value_dim) * pairs,
        head=2 * passes * config.vocab_size * config.hidden_size * counted,
    )


def active_elements(config: ModelConfig, layer: int, *, mlps: bool = True) -> int:
    """Of the matrices of a layer, how many elements a token is multiplied by. mlps: those of MLPs and experts too."""
    return _active_elements(config, mlps)[layer]


# A run counts the work of every step.
@lru_cache(maxsize=64)
def _active_elements(config: ModelConfig, mlps: bool) -> tuple[int, ...]:
    """Of each layer, by the shapes of its matrices; of experts those that a token goes to. Convolutions are none."""
    left_out = ("bias", "conv") if mlps else ("bias", "conv", "mlp")
    found = [0] * config.num_layers
    for name, parameter in meta_model(config).named_parameters():
        if name.startswith("model.layers.") and parameter.dim() > 1 and not any(one in name for one in left_out):
            count = parameter.numel()
            if config.experts is not None and ".experts." in name:
                count = config.experts.per_token * parameter[0].numel()
            found[int(name.split(".")[2])] += count
    return tuple(found)


def visible_pairs(lengths: Sequence[int] | NDArray[np.int32], window: int | None) -> int:
    """Queries and the keys that they see, of documents of these lengths: each token the `window` latest, itself too."""
    tokens = np.asarray(lengths, dtype=np.int64)
    growing = tokens if window is None else np.minimum(tokens, window)  # each of these sees one key more than the last
    return int((growing * (growing + 1) // 2 + (tokens - growing) * growing).sum())
