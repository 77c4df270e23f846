"""Attention in which long prompts see the blocks of keys that hold most of a pooled softmax, and no others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse import prompts_cuda
from strata.kernels.attention.sparse.block_choice import BlockChoice, kept_blocks, pooled_scores
from strata.kernels.attention.sparse.by_sequence import by_sequence, over_chosen
from strata.kernels.attention.spec import SparseCall, pages_of
from strata.kernels.op import operation


def _cost(call: SparseCall[BlockChoice], *, workload: Workload) -> Cost:
    """That of all keys: how many are left out depends on what they are."""
    return attention.cost(*call.whole, workload=workload)


@operation(_cost, operands=SparseCall, reads_state=True)
def block_sparse_attention(call: SparseCall[BlockChoice]) -> Tensor:
    """As `attention` over pages, where queries of sequences with several new tokens and `choice.least_keys` or more in
    all see, of the keys at their positions and before, those in blocks that they keep: see `kept_blocks`.

    Blocks of queries begin with the first new token of a sequence in this step, so what they keep depends on where a
    prompt was cut; it does not on other sequences. spec: without a window. Without pages all keys are seen.
    """
    return by_sequence(call, attention.reference, _prompt)


def _prompt(call: SparseCall[BlockChoice], total: int) -> Tensor | None:
    """The queries of one sequence, over what is left of it: to each block of them it is a shorter sequence."""
    q, k, pages, spec, choice = call.q, call.k, pages_of(call.batch), call.spec, call.choice
    new, block, per_block, group = len(q), choice.block, choice.block // pages.page_size, q.shape[1] // k.shape[1]
    if new == 1 or total < max(new, choice.least_keys):
        return None
    out, table = torch.empty_like(q), pages.tables[0, : -(-total // pages.page_size)].long()
    precision = torch.promote_types(q.dtype, torch.float32)
    keys = pages.rows(spec.layer, table, precision)[0].flatten(0, 1)[:total].to(precision)
    for kv_head in range(k.shape[1]):
        members = slice(kv_head * group, (kv_head + 1) * group)
        scores = pooled_scores(q[:, members].to(precision), keys[:, kv_head], choice, spec.scale)
        for first, blocks in zip(range(0, new, block), kept_blocks(scores, new, total, choice), strict=True):
            rows = slice(first, min(first + block, new))
            end = total - new + rows.stop
            used = blocks.repeat_interleave(per_block)[: -(-end // pages.page_size)]
            # The last block is always kept, and nothing in it from `end` on is seen.
            length = int(blocks.sum()) * block - (-end % block)
            out[rows, members] = over_chosen(call, kv_head, rows, table[: len(used)][used], length)
    return out


block_sparse_attention.implement("blocks", "cpu")(partial(by_sequence, whole=attention.bind("cpu"), sparse=_prompt))
block_sparse_attention.in_triton(prompts_cuda.attend, supports=prompts_cuda.supports, kernels=prompts_cuda.kernels)
