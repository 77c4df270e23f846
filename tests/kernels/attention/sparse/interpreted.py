"""The Triton kernels of sparse attention in Triton's interpreter, against the reference, for `test_prompts`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.sparse import prompts_cuda
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.device_limits import DeviceLimits
from tests.kernels.attention.sparse.interpreted_pages import compare_pages
from tests.kernels.attention.sparse.test_prompts import CHOICE, SINKS, SPEC
from tests.kernels.attention.test_attention import Case
from tests.kernels.collective.interpreted import _counts


def compare(given: tuple[Any, ...], alike: tuple[Any, ...], choice: BlockChoice, sinks: Tensor | None) -> None:
    wanted = block_sparse_attention.reference(*given, SPEC, choice, sinks)
    found = prompts_cuda.attend(*alike, SPEC, choice, sinks)
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


if __name__ == "__main__":
    limits = DeviceLimits("interpreter", capability=(8, 0), shared_bytes=0, processors=0)
    DeviceLimits.of = staticmethod(lambda device: limits)  # type: ignore[method-assign]
    prompts_cuda.POOLED_TILE |= {"ROWS": 32, "COLUMNS": 16}
    _counts()
    torch.manual_seed(0)
    step_with_decodes()
    stretches_of_several_pages()
    compare_pages()
    print("equal")
