"""Zeros behind the last tokens of prompts, for attention that reads whole blocks of keys and gives no weight to some.

A value that is not finite stays so when it is multiplied by zero. A page may hold such values of a sequence that had it
before, and its next owner's results must not follow from them.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(
    keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, bounds: Tensor, most: int, *, workload: Workload
) -> Cost:
    page_size, row = keys.shape[2], keys.shape[0] * keys.shape[3] * keys.shape[4] * keys.element_size()
    slots = sum(-total % page_size for new, total in zip(workload.new, workload.total, strict=True) if new > 1)
    return Cost(written=2 * row * slots)


def _meta(keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, bounds: Tensor, most: int) -> Tensor:
    return tables


@operation(_cost, meta=_meta, mutates=("keys", "values"))
def clear_page_ends(keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, bounds: Tensor, most: int) -> Tensor:
    """Write zeros behind the last token of each prompt, up to the end of its page; returns `tables`.

    keys, values: [layers, pages, page_size, kv_heads, head_dim], the pools of all layers. tables, lengths: as in
    `PagedKV`. bounds: as in `BatchParts`; the prompts are the sequences from bounds[0] on, at most `most` of them,
    whose length is not 0.
    """
    page_size = keys.shape[2]
    for sequence in range(int(bounds[0]), len(lengths)):
        total = int(lengths[sequence])
        if total % page_size:
            page = int(tables[sequence, total // page_size])
            keys[:, page, total % page_size :] = 0
            values[:, page, total % page_size :] = 0
    return tables


clear_page_ends.implement("torch", "cpu", invariant=True)(clear_page_ends.reference)

_BLOCK = 1024


@partial(jit, unspecialized=("lengths", "bounds", "sequences", "most_pages", "pages"))
def clear_page_ends_kernel(
    keys,
    values,
    tables,
    lengths,
    bounds,
    sequences,
    most_pages,
    pages,
    row,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [layers, prompts]. pages: of a layer's pool. row: elements of a token."""
    sequence = tl.load(bounds) + tl.program_id(1)
    length = tl.load(lengths + sequence, mask=sequence < sequences, other=0)
    used = length % PAGE_SIZE
    if used == 0:
        return
    page = tl.load(tables + sequence.to(tl.int64) * most_pages + length // PAGE_SIZE).to(tl.int64)
    first = ((tl.program_id(0).to(tl.int64) * pages + page) * PAGE_SIZE + used) * row
    elements = (PAGE_SIZE - used) * row
    start = 0
    while start < elements:
        element = start + tl.arange(0, BLOCK)
        nothing = tl.zeros((BLOCK,), keys.dtype.element_ty)
        tl.store(keys + first + element, nothing, mask=element < elements)
        tl.store(values + first + element, nothing, mask=element < elements)
        start += BLOCK


def _triton(keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, bounds: Tensor, most: int) -> Tensor:
    layers, pages, page_size, kv_heads, head_dim = keys.shape
    clear_page_ends_kernel[(layers, most)](
        *(keys, values, tables, lengths, bounds, len(lengths), tables.shape[1], pages, kv_heads * head_dim),
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
    )
    return tables


def _fits(keys: Tensor, values: Tensor, *others: object) -> bool:
    return keys.is_contiguous() and values.is_contiguous()


if HAS_TRITON:
    clear_page_ends.implement("triton", "cuda", invariant=True, supports=_fits, kernels=(clear_page_ends_kernel,))(
        _triton
    )
