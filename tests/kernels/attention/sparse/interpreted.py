"""The Triton kernels of sparse attention in Triton's interpreter, against the reference, for `test_prompts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.sparse import prompts_cuda
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.attention.spec import SparseCall
from strata.kernels.attention.varlen_triton import Tile
from strata.kernels.device_limits import DeviceLimits
from tests.kernels.attention.sparse.interpreted_pages import compare_pages
from tests.kernels.attention.sparse.test_prompts import CHOICE, SINKS, SPEC
from tests.kernels.attention.test_attention import Case
from tests.kernels.interpreter import prepare_interpreter


def compare(given: tuple[Any, ...], alike: tuple[Any, ...], choice: BlockChoice, sinks: Tensor | None) -> None:
    wanted = block_sparse_attention.reference(*given, SPEC, choice, sinks)
    found = prompts_cuda.attend(SparseCall(*alike, SPEC, choice, sinks))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def step_with_decodes() -> None:
    case = Case.random([70, 5, 66, 101], heads=6, kv_heads=2, head_dim=12)
    q, k, v, batch = case.batch([1, 5, 18, 21], layers=2)
    starts, lengths = batch.offsets[:-1].clone(), batch.pages.lengths.clone()
    starts[0], lengths[1:] = 1, 0
    parts = BatchParts(lengths, starts, torch.tensor([1, 4]).int(), decodes=1)
    divided = batch._replace(pages=replace(batch.pages, parts=parts))
    compare((q, k, v, batch), (q, k, v, divided), CHOICE, torch.cat((SINKS, SINKS[:2])))


def stretches_of_several_pages() -> None:
    given = Case.random([1, 150], heads=2, kv_heads=1, head_dim=16).batch([1, 40], layers=2)
    compare(given, given, CHOICE._replace(share=0.4, stride=32, block=32), None)


def tiles_of_queries_across_blocks() -> None:
    """A tile of scores ends within a block of queries, which sees keys that the tile's programs have not reached."""
    given = Case.random([80], heads=3, kv_heads=1, head_dim=16).batch([60], layers=2)
    compare(given, given, CHOICE._replace(share=0.4), None)


def poisoned(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What nothing has been written to is not a number."""

    def filled(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    return filled


if __name__ == "__main__":
    limits = DeviceLimits("interpreter", capability=(8, 0), shared_bytes=0, processors=0)
    DeviceLimits.of = staticmethod(lambda device: limits)  # type: ignore[method-assign]
    prompts_cuda.pooled_tile = lambda head_dim, dtype: Tile(32, 16, 4, 1)  # type: ignore[assignment]
    torch.empty = poisoned(torch.empty)  # type: ignore[assignment]
    prepare_interpreter()
    torch.manual_seed(0)
    step_with_decodes()
    stretches_of_several_pages()
    tiles_of_queries_across_blocks()
    compare_pages()
    print("equal")
