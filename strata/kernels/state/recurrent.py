"""Where the states of a batch lie whose size does not depend on how long its sequences are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class RecurrentStates:
    """The fixed states of all layers (a recurrence's state, the last inputs of a convolution) and whose rows they are.

    tensors: for each layer of the model those that it declares, in their order, [rows, *shape] each; of a layer that
        declares none, none. They stay at their addresses as long as the engine.
    slots: [sequences] int32, the row of each sequence of the batch, in the tensors of all layers.

    What an operation that keeps such a state must do, given this, a layer, and `offsets` and `positions` of the batch:

    - a sequence whose first token of the batch has position 0 begins from zeros, whatever its row holds, NaN included;
      every other begins from its row;
    - at the end its row holds the state behind its last token of the batch; a sequence without tokens leaves its row;
    - padding sequences share a row that nobody reads. They begin at position 0, and their writes may meet in any order.

    It writes in place, so it declares this argument in `mutates`, and it `reads_state`. Nothing of it is read on the
    host.
    """

    tensors: tuple[tuple[Tensor, ...], ...]
    slots: Tensor


pytree.register_dataclass(RecurrentStates)
