"""The ids a step reads from the device, and memory that a recording lends without keeping it."""

from __future__ import annotations

import pytest
import torch

from strata.graph.cudagraph import non_owning_view
from strata.kernels.state.gather_tables import newest_tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [1, 3, 255, 256, 257, 8192])
def test_the_kernel_reads_what_the_reference_reads(count: int) -> None:
    newest = torch.randint(-1, 1000, (300,), dtype=torch.int32, device="cuda")
    buffer = torch.randint(0, 1000, (2 * count + 1,), dtype=torch.int32, device="cuda")[1:]  # at an odd address
    tokens, sources = buffer[:count], buffer[count:].remainder(301).sub(1)
    assert torch.equal(newest_tokens(tokens, sources, newest), newest_tokens.reference(tokens, sources, newest))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_non_owning_view_is_the_same_memory_and_does_not_keep_it(dtype: torch.dtype) -> None:
    owner = torch.randn(5, 33, device="cuda").to(dtype)
    lent = non_owning_view(owner)
    assert lent.data_ptr() == owner.data_ptr()
    assert torch.equal(lent, owner)
    owner.fill_(2)
    assert bool((lent == 2).all())
    held = torch.cuda.memory_allocated()
    del owner
    assert torch.cuda.memory_allocated() < held
