"""An allocator that counts: bytes of the tensors that are alive, of those made inside."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """most: bytes alive at once. known: tensors whose memory does not count; block: of which memory is multiples."""

    def __init__(self, known: Iterable[Any] = (), block: int = 1) -> None:
        super().__init__()
        self._block, self._kept = block, tree_leaves(list(known))
        self._sizes = {one.untyped_storage()._cdata: 0 for one in self._kept if isinstance(one, Tensor)}
        self.most = 0

    @property
    def now(self) -> int:
        return sum(self._sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = -(-storage.nbytes() // self._block) * self._block
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
                self.most = max(self.most, self.now)
        return result


def tensors_of(graph: fx.GraphModule) -> list[Any]:
    """What a graph fetches, packed weights too."""
    return [*graph.parameters(), *graph.buffers(), *(getattr(one, "tensors", one) for one in vars(graph).values())]
