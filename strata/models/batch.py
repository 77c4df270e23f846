"""What a model is called with: packed sequences, no padding, no batch dimension."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree

from strata.kernels.attention.spec import Sequences
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.recurrent import RecurrentStates


@dataclass(frozen=True)
class Batch:
    """The tokens of one step, sequence after sequence. All tensors are int32.

    tokens: [tokens] ids.
    positions: [tokens] position of each token in its own sequence.
    offsets: [sequences + 1] index of each sequence's first token in `tokens`; the last entry is the number of tokens.
    longest: the most tokens that one sequence has in this batch.
    pages: the KV cache; None when every sequence stands whole in the batch (training, scoring).
    groups: where layers keep state of several kinds, what those of each group behind the first are given, see
        `of_group`; empty: all layers share the pages.
    states: of layers that keep a state of fixed size; None when every sequence stands whole in the batch, and for
        models without such layers.
    tags: [sequences, 2] rows of each sequence's adapter and of its weights' version, 0 where it has none; None when no
        sequence of the step has any.
    """

    tokens: Tensor
    positions: Tensor
    offsets: Tensor
    longest: int
    pages: PagedKV | None = None
    groups: tuple[Sequences, ...] = ()
    states: RecurrentStates | None = None
    tags: Tensor | None = None


pytree.register_dataclass(Batch)
