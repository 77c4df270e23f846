"""Where the keys and values of a batch lie when they are kept in pages (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.utils import _pytree as pytree

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.cpu_plan import AttentionPlan


@dataclass(frozen=True)
class PagedKV:
    """The KV pools of all layers and the way of each sequence through them.

    keys, values: a tensor a layer, [pages, page_size, kv_heads, head_dim].
    tables: [sequences, most_pages] int32, the pages of each sequence in order; entries past its length are unspecified,
        and nothing may be read by them.
    lengths: [sequences] int32, tokens of each sequence once this batch's have been written. 0 marks a padding row.
    slot_mapping: [tokens] int32, page * page_size + offset where each token's key and value go; -1 writes nothing.
    plan: what attention on a CPU needs to know of this step in every layer (`attention_cpu.planned` makes it); None:
        each layer works it out from the tensors above.
    index: [tokens] int64, the slot mapping again, if none of it is -1: a CPU writes by it. None: each layer looks.
    parts: for CUDA, which kernel attends for which rows of a step with prompts; None: attention treats all alike.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tables: Tensor
    lengths: Tensor
    slot_mapping: Tensor
    plan: AttentionPlan | None = None
    index: Tensor | None = None
    parts: BatchParts | None = None

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    def sequences(self, first: int, last: int) -> PagedKV:
        """What attention needs of sequences [first, last); the slot mapping is left as it is."""
        tables, lengths = self.tables[first:last], self.lengths[first:last]
        return PagedKV(self.keys, self.values, tables, lengths, self.slot_mapping)


pytree.register_dataclass(PagedKV)
