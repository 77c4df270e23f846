"""What a captured step reads that only the device knows: block tables, gathered where they lie once each last token's
page is entered, and the ids that an earlier step drew."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


class TablesCall(NamedTuple):
    """The operands of `gather_tables`.

    tables: [slots + 1, page_limit] int32 of all sequences, in which the page of a last token is entered; rows:
    [sequences] int32, whose they are. offsets: [sequences + 1], lengths: [sequences], slot_mapping: [tokens], all
    int32, as in `Batch` and `PagedKV`: the page follows from them, so that of one token nothing else has to tell the
    device. Length 0 enters nothing.
    """

    tables: Tensor
    rows: Tensor
    offsets: Tensor
    lengths: Tensor
    slot_mapping: Tensor
    page_size: int


def _cost(call: TablesCall, *, workload: Workload) -> Cost:
    pages = sum(-(-total // call.page_size) for total in workload.total)
    return Cost(read=4 * call.rows.nbytes + 4 * pages, written=4 * pages)


def _meta(call: TablesCall) -> Tensor:
    return call.tables.new_empty((len(call.rows), call.tables.shape[1]), device="meta")


@operation(_cost, operands=TablesCall, meta=_meta, mutates=("tables",))
def gather_tables(call: TablesCall) -> Tensor:
    """The tables of a step's sequences, [sequences, page_limit] int32, right up to the page of each last token."""
    tables, rows, offsets, lengths, slot_mapping, page_size = call
    held = lengths > 0
    last = slot_mapping[offsets[1:][held].long() - 1]
    tables[rows[held].long(), ((lengths[held] - 1) // page_size).long()] = last // page_size
    return tables.index_select(0, rows)


gather_tables.by_definition("cpu", invariant=True)

_BLOCK = 1024


# The inputs of a step are views of one buffer, at any address.
@partial(jit, unspecialized=("rows", "offsets", "lengths", "slot_mapping", "page_limit"))
def gather_tables_kernel(
    tables, rows, offsets, lengths, slot_mapping, result, page_limit, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs [sequences, page_limit / BLOCK]; those past the page of the last token have nothing to do."""
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + sequence)
    last = tl.maximum(length - 1, 0) // PAGE_SIZE
    first = tl.program_id(1) * BLOCK
    if first > last:
        return
    token = tl.load(offsets + sequence + 1) - 1
    slot = tl.load(slot_mapping + token, mask=length > 0, other=-1)
    table = tables + tl.load(rows + sequence).to(tl.int64) * page_limit
    column = first + tl.arange(0, BLOCK)
    new = (column == last) & (slot >= 0)
    page = tl.load(table + column, mask=(column <= last) & (column < page_limit) & ~new, other=0)
    page = tl.where(new, slot // PAGE_SIZE, page)
    tl.store(table + column, page, mask=new)
    tl.store(result + sequence * page_limit + column, page, mask=(column <= last) & (column < page_limit))


def _triton(call: TablesCall) -> Tensor:
    tables, rows, *others, page_size = call
    sequences, page_limit = len(rows), tables.shape[1]
    result = torch.empty((sequences, page_limit), dtype=tables.dtype, device=tables.device)
    if sequences:
        grid = (sequences, ceil_div(page_limit, _BLOCK))
        gather_tables_kernel[grid](tables, rows, *others, result, page_limit, PAGE_SIZE=page_size, BLOCK=_BLOCK)
    return result


gather_tables.in_triton(_triton, invariant=True, kernels=(gather_tables_kernel,))


def _ids_cost(tokens: Tensor, sources: Tensor, newest: Tensor, *, workload: Workload) -> Cost:
    return Cost(flops=0, read=tokens.nbytes + sources.nbytes + tokens.nbytes, written=tokens.nbytes)


@operation(_ids_cost)
def newest_tokens(tokens: Tensor, sources: Tensor, newest: Tensor) -> Tensor:
    """The id at `newest[source]` where a source is not negative, else the token: all int32, [tokens] -> [tokens].

    newest [slots] holds `NO_ID` where nothing could be drawn: that sequence has ended, and reads id 0.
    """
    return torch.where(sources >= 0, newest[sources.clamp(min=0)].clamp(min=0), tokens)


newest_tokens.by_definition("cpu", invariant=True)

_IDS = 256


# The inputs of a step are views of one buffer, at any address.
@partial(jit, unspecialized=("tokens", "sources", "count"))
def newest_tokens_kernel(tokens, sources, newest, result, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = offset < count
    source = tl.load(sources + offset, mask=held, other=-1)
    drawn = tl.load(newest + source, mask=source >= 0, other=0)
    token = tl.load(tokens + offset, mask=held & (source < 0), other=0)
    tl.store(result + offset, tl.where(source >= 0, tl.maximum(drawn, 0), token), mask=held)


def _newest_triton(tokens: Tensor, sources: Tensor, newest: Tensor) -> Tensor:
    result = tokens.new_empty(tokens.shape)
    count = tokens.numel()
    if count:
        newest_tokens_kernel[(ceil_div(count, _IDS),)](tokens, sources, newest, result, count, BLOCK=_IDS)
    return result


newest_tokens.in_triton(_newest_triton, invariant=True, kernels=(newest_tokens_kernel,))
