"""Functions of single elements on a CPU in which no element's bits depend on its place."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# ATen computes in vectors of up to 64 elements and the rest of a call one by one, with another exponential. It divides
# calls of 32768 elements and more among threads.
_VECTOR = 64
_BLOCK = 16384


def in_whole_vectors(x: Tensor, run: Callable[[Tensor], object]) -> Tensor:
    """A copy of x on which `run` has worked in place, in blocks that one thread computes in whole vectors."""
    count = x.numel()
    flat = x.new_zeros(-(-count // _VECTOR) * _VECTOR)
    flat[:count].view(x.shape).copy_(x)
    for block in flat.split(_BLOCK):
        run(block)
    return flat[:count].view(x.shape)


def in_blocks(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of single elements, computed in whole vectors."""
    return lambda x: in_whole_vectors(x, lambda block: block.copy_(run(block)))
