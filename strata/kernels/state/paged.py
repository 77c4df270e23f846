"""Where the keys and values of a batch lie when they are kept in pages (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.cpu_plan import AttentionPlan
from strata.kernels.state.quantized_rows import widen_rows


@dataclass(frozen=True)
class PagedKV:
    """The KV pools of all layers and the way of each sequence through them.

    keys, values: a tensor a layer, [pages, page_size, kv_heads, head_dim].
    tables: [sequences, page_limit] int32, the pages of each sequence in order; entries past its length are unspecified,
        and nothing may be read by them.
    lengths: [sequences] int32, tokens of each sequence once this batch's have been written. 0 marks a padding row.
    slot_mapping: [tokens] int32, page * page_size + offset where each token's key and value go; -1 of padding and
        -2 of a token that another rank keeps (`dcp_shard`) write nothing.
    plan: what attention on a CPU needs to know of this step in every layer (`attention_cpu.planned` makes it); None:
        each layer works it out from the tensors above.
    index: [tokens] int64, the slot mapping again, if none of it is negative: a CPU writes by it. None: layers look.
    parts: for CUDA, which kernel attends for which rows of a step with prompts; None: attention treats all alike.
    key_exponents, value_exponents: a tensor a layer, [pages, kv_heads, page_size] uint8, where the pools hold 8 bits
        (see `quantized_rows`); empty: the pools hold what is written as it is.
    bounds: a tensor a layer, [pages, 2, kv_heads, head_dim] in the keys' dtype, the smallest and the largest element of
        the keys of each page; empty: nobody chooses pages (see `page_choice`).
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tables: Tensor
    lengths: Tensor
    slot_mapping: Tensor
    plan: AttentionPlan | None = None
    index: Tensor | None = None
    parts: BatchSplit | None = None
    key_exponents: tuple[Tensor, ...] = ()
    value_exponents: tuple[Tensor, ...] = ()
    bounds: tuple[Tensor, ...] = ()

    @property
    def is_quantized(self) -> bool:
        return bool(self.key_exponents)

    def exponents(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Of a layer's keys and values; None where the pools hold what is written as it is."""
        return (self.key_exponents[layer], self.value_exponents[layer]) if self.is_quantized else (None, None)

    def holds(self, layer: int, dtype: torch.dtype) -> bool:
        """Whether a layer's rows can be read in `dtype` without loss."""
        return self.is_quantized or self.keys[layer].dtype == self.values[layer].dtype == dtype

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    def sequences(self, first: int, last: int) -> PagedKV:
        """What attention needs of sequences [first, last); the slot mapping is left as it is."""
        tables, lengths = self.tables[first:last], self.lengths[first:last]
        others = self.key_exponents, self.value_exponents, self.bounds
        return PagedKV(self.keys, self.values, tables, lengths, self.slot_mapping, None, None, None, *others)

    def rows(self, layer: int, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys and values of whole pages, by their numbers [count]: [count, page_size, kv_heads, head_dim]."""
        keys, values = self.keys[layer][pages], self.values[layer][pages]
        if not self.is_quantized:
            return keys, values
        exponents = (each[layer][pages].transpose(1, 2) for each in (self.key_exponents, self.value_exponents))
        key, value = (widen_rows(one, other, dtype) for one, other in zip((keys, values), exponents, strict=True))
        return key, value

    def rows_at(self, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys and values at `slots` [count] int64, page * page_size + offset: [count, kv_heads, head_dim]."""
        found = []
        for pool, exponents in ((self.keys, self.key_exponents), (self.values, self.value_exponents)):
            rows = pool[layer].flatten(0, 1).index_select(0, slots)
            if exponents:
                of_rows = exponents[layer][slots // self.page_size, :, slots % self.page_size]
                rows = widen_rows(rows, of_rows, dtype)
            found.append(rows)
        return found[0], found[1]


pytree.register_dataclass(PagedKV)
