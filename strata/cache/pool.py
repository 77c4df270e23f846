"""The tensors that hold keys and values: for each layer a pool of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard
from strata.models.config import ModelConfig
from strata.models.state import attention_rows


@dataclass(frozen=True)
class PoolShape:
    """What decides the size of the pools. `page_size` in tokens, of those that `kept` says: other ranks have the others
    of a page. tensors: 2 for keys and values, 1 if a row is both. quantized: in which 8 bits rows are kept
    (`quantized_rows`); None: in `dtype`, that of the weights. has_bounds: whether pages have bounds of their keys
    (`page_choice`)."""

    layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    tensors: int = 2
    quantized: torch.dtype | None = None
    has_bounds: bool = False
    kept: DcpShard = ALL_KEYS

    @staticmethod
    def of(config: ModelConfig, page_size: int, dtype: torch.dtype) -> PoolShape:
        """Of all layers of a model, were they alike."""
        rows = attention_rows(config)
        heads, width = rows.shape
        return PoolShape(config.num_layers, page_size, heads, width, rows.dtype or dtype, rows.tensors)

    @property
    def page_tokens(self) -> int:
        """Tokens of a sequence that a page stands for, on all ranks that divide them."""
        return self.page_size * self.kept.ranks

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, all tensors."""
        # With an exponent for each head of a row in 8 bits.
        head = self.head_dim + 1 if self.quantized else self.head_dim * self.dtype.itemsize
        row = self.kv_heads * head
        bounds = 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize if self.has_bounds else 0
        return self.tensors * self.layers * self.page_size * row + bounds


class KVPool:
    """Keys and values of each layer, [pages, page_size, kv_heads, head_dim], zeroed so that unused rows are finite.

    all_keys, all_values: those of all layers, [layers, pages, ...]; the same where a row is both key and value. keys,
    values: those of a layer, by its number. key_exponents, value_exponents: of pools in 8 bits, as `PagedKV` has them;
    bounds: where pages are chosen, of which copies have none until the next key is written.
    """

    def __init__(
        self, shape: PoolShape, pages: int, device: torch.device, held: tuple[Sequence[int], int] | None = None
    ) -> None:
        """held: the numbers of the pool's layers, and how many the model has; None: all are its own."""
        self.shape = shape
        self.pages = pages
        size = (shape.layers, pages, shape.page_size, shape.kv_heads, shape.head_dim)
        kind = shape.quantized or shape.dtype
        made = [torch.zeros(size, dtype=kind, device=device) for _ in range(shape.tensors)]
        self.all_keys, self.all_values = made[0], made[-1]
        numbers, layers = held or (range(shape.layers), shape.layers)
        nothing = self.all_keys.new_zeros((0, shape.page_size, 0, 0))

        def by_layer(of_all: Tensor) -> tuple[Tensor, ...]:
            return tuple(of_all[numbers.index(layer)] if layer in numbers else nothing for layer in range(layers))

        self.keys, self.values = by_layer(self.all_keys), by_layer(self.all_values)
        self._exponents: list[Tensor] = []
        self.key_exponents: tuple[Tensor, ...] = ()
        self.value_exponents: tuple[Tensor, ...] = ()
        if shape.quantized is not None:
            heads = (shape.layers, pages, shape.kv_heads, shape.page_size)
            self._exponents = [torch.zeros(heads, dtype=torch.uint8, device=device) for _ in range(shape.tensors)]
            self.key_exponents, self.value_exponents = by_layer(self._exponents[0]), by_layer(self._exponents[-1])

        self.bounds: tuple[Tensor, ...] = ()
        if shape.has_bounds:
            self.bounds = by_layer(torch.zeros((*size[:2], 2, *size[3:]), dtype=shape.dtype, device=device))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages (source, destination) in every layer, for copy-on-write."""
        pairs = torch.tensor(copies, pin_memory=self.all_keys.is_cuda)
        source, target = pairs.to(self.all_keys.device, non_blocking=True).unbind(1)
        of_all = [self.all_keys, *([self.all_values] if self.shape.tensors == 2 else ()), *self._exponents]
        for pool in (layer for each in of_all for layer in each):
            if self.shape.quantized is not None:
                pool = pool.view(torch.uint8)  # bytes can be copied by index on every device
            pool.index_copy_(0, target, pool.index_select(0, source))
