"""Which kernel attends for which rows of a step with prompts: the same in every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strata.kernels.attention.query_chunks import QueryChunks


@dataclass(frozen=True)
class BatchSplit:
    """The division of a step with prompts among kernels of attention: the first sequences of the batch, as long as they
    have one new token, are decodes, and the others prompts.

    decode_lengths: [sequences] int32, the lengths of decodes, 0 of the others. starts: [sequences] int32, the first row
    of each sequence that the kernel over pages would take, of a decode none. bounds: [2] int32, the first sequence that
    is no decode, and where the sequences end, the one included to which padding belongs; there is one between them,
    where kernels begin to look. decodes: how many there are; None in a captured step, of which only the device knows
    it, but for pure prefill, which has none. query_chunks: the prompts, for cuDNN; None: the kernel over pages takes
    them. begin: the host knows that the prompts have no tokens from before the step; False in a captured step unless it
    is pure prefill.
    """

    decode_lengths: Tensor
    starts: Tensor
    bounds: Tensor
    decodes: int | None = None
    query_chunks: QueryChunks | None = None
    begin: bool = False
