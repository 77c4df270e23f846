"""Which blocks of keys the queries of a prompt attend to: the fewest that hold a share of the pooled softmax.

Scores are sums along antidiagonals (XAttention, Xu et al. 2025, arXiv:2503.16428): each stretch of queries, backwards,
meets each stretch of keys, forwards, in one product. Single large scores show there, which mean queries and keys would
average away. Blocks are added by their weight until they hold the share (FlexPrefill, Lai et al. 2025,
arXiv:2502.20766), beside those that are always kept (the first and the newest, as in MInference, Jiang et al. 2024,
arXiv:2407.02490).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from strata.kernels.grid_sizes import ceil_div


class BlockChoice(NamedTuple):
    """share: of the pooled softmax that kept blocks hold, in (0, 1]; 1 keeps all.

    min_keys: of a sequence with several new tokens that attends to blocks; shorter ones see all keys. block: keys,
    and queries, of a block, a multiple of `stride` and of a page's tokens. stride: queries, and keys, of a stretch.
    local: blocks before the queries' own that are always kept, as these and the first of all are.
    """

    share: float
    min_keys: int
    block: int = 128
    stride: int = 16
    local: int = 2


def pooled_scores(q: Tensor, keys: Tensor, choice: BlockChoice, scale: float) -> Tensor:
    """How much each block of keys has of the pooled softmax, [query blocks, key blocks], of the head that gives most.

    q: [new, heads, head_dim], the last queries of a sequence, of the heads that share a KV head; keys: [total,
    head_dim]. Of a head the weights of a block's stretches are averaged; over heads an average would lose what one of
    them looks for. Blocks of queries are counted from the first of q on, those of keys from position
    0. A stretch of queries has no weight on one of keys that begins behind its last query.
    """
    (new, total), (block, stride) = (len(q), len(keys)), choice[2:4]
    rows, columns = ceil_div(new, stride), ceil_div(total, stride)
    queries = pad(q, (0, 0, 0, 0, 0, rows * stride - new)).unflatten(0, (rows, stride)).flip(1)
    stretches = pad(keys, (0, 0, 0, columns * stride - total)).unflatten(0, (columns, stride))
    scores = torch.einsum("rthd,ctd->rhc", queries, stretches) * (scale / stride)
    last = (torch.arange(1, rows + 1, device=q.device) * stride).clamp(max=new) + total - new - 1
    hidden = torch.arange(columns, device=q.device) * stride > last[:, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    per = block // stride
    weights = pad(weights, (0, -columns % per)).unflatten(2, (-1, per)).sum(-1)
    return torch.stack([part.mean(0).amax(0) for part in weights.split(per)])


def chosen_blocks(scores: Tensor, new: int, total: int, choice: BlockChoice) -> Tensor:
    """Which blocks of keys each block of queries attends to, [query blocks, key blocks] bool.

    scores: of `pooled_scores`, for the last `new` of `total` tokens. Blocks of equal weight are kept together.
    """
    firsts = torch.arange(0, new, choice.block, device=scores.device) + total - new
    lasts = (firsts + choice.block).clamp(max=total) - 1
    at = torch.arange(scores.shape[1], device=scores.device)
    seen = at <= (lasts // choice.block)[:, None]
    if choice.share >= 1:
        return seen
    always = seen & ((at == 0) | (at >= (firsts // choice.block - choice.local)[:, None]))
    missing = choice.share * scores.sum(1, keepdim=True) - (scores * always).sum(1, keepdim=True)
    free = scores.masked_fill(always | ~seen, 0)
    ordered = free.sort(1, descending=True).values
    needed = ordered.cumsum(1) - ordered < missing
    least = ordered.masked_fill(~needed, torch.inf).amin(1, keepdim=True)
    return always | (seen & ~always & (free >= least))
