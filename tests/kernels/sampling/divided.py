"""What ranks that divide the vocabulary draw and tell, in one process."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from strata.kernels.sampling.part_logprobs import count_above, logprobs_in_part, logprobs_of_parts
from strata.kernels.sampling.parts import best_in_part, best_of_parts


def cuts(vocabulary: int, parts: int) -> list[tuple[int, int]]:
    """First and end of each rank's ids: as many for all but the last ones, which hold fewer or none."""
    own = -(-vocabulary // parts)
    bounds = [min(part * own, vocabulary) for part in range(parts + 1)]
    return list(pairwise(bounds))


def drawn(logits: Tensor, parts: int, *inputs: Tensor) -> Tensor:
    """The ids of `gumbel_sample`, as ranks draw them; each part lies inside the wider tensor."""
    own = [best_in_part(logits[:, first:end], *inputs, first) for first, end in cuts(logits.shape[1], parts)]
    return best_of_parts(torch.cat(own, 1))  # type: ignore[no-any-return]


def told(logits: Tensor, ids: Tensor, top: int, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `logprobs` gives, as ranks make it."""
    vocabulary = logits.shape[1]
    own = [(logits[:, first:end], first) for first, end in cuts(vocabulary, parts)]
    found = torch.stack([logprobs_in_part(part, ids, top, first) for part, first in own], 1)
    assert found.shape == (len(logits), parts, 2 + top)
    chosen, chosen_logprobs, top_ids, top_logprobs = logprobs_of_parts(found, vocabulary)
    wanted = logits.float().gather(1, ids.long()[:, None])[:, 0]
    assert torch.equal(chosen, wanted.nan_to_num(torch.inf, torch.inf, -torch.inf))
    ranks = torch.cat([count_above(part, chosen) for part, _ in own], 1).sum(1, dtype=torch.int32) + 1
    return chosen_logprobs, ranks, top_ids, top_logprobs
