"""The Triton kernels of attention over chosen pages in Triton's interpreter, against the reference, for `test_decodes`.

What is tested is the division, the pages and the order of the sums: the interpreter computes in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.sparse import decodes_cuda
from strata.kernels.attention.sparse.decodes import page_sparse_attention
from strata.kernels.device_limits import DeviceLimits
from tests.kernels.attention.sparse.test_decodes import CHOICE, SINKS, SPEC, with_bounds
from tests.kernels.attention.test_attention import Case
from tests.kernels.collective.interpreted import _counts


def copied(given: tuple[Any, ...], **parts: BatchParts) -> tuple[Any, ...]:
    *vectors, batch = given
    pages = replace(batch.pages, bounds=tuple(one.clone() for one in batch.pages.bounds), **parts)
    return *vectors, batch._replace(pages=pages)


def compare(given: tuple[Any, ...], alike: tuple[Any, ...]) -> None:
    wanted = page_sparse_attention.reference(*given, SPEC, CHOICE, SINKS)
    found = decodes_cuda.attend(*alike, SPEC, CHOICE, SINKS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(alike[3].pages.bounds, given[3].pages.bounds, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


if __name__ == "__main__":
    limits = DeviceLimits("interpreter", capability=(8, 0), shared_bytes=0, processors=0)
    DeviceLimits.of = staticmethod(lambda device: limits)  # type: ignore[method-assign]
    decodes_cuda._LEAST_PLACES = 8
    _counts()
    torch.manual_seed(0)
    case = Case.random([40, 150, 97], heads=6, kv_heads=2, head_dim=12)
    steps = with_bounds(case.batch([1, 1, 1], layers=2))
    compare(steps, copied(steps))
    mixed = with_bounds(case.batch([1, 1, 20], layers=2))
    offsets, lengths = mixed[3].offsets, mixed[3].pages.lengths.clone()
    lengths[2] = 0
    starts = torch.tensor([1, 2, 2]).int()
    for decodes in (2, None):  # None: recorded, where only the device knows it
        parts = BatchParts(lengths, starts, torch.tensor([2, 3]).int(), decodes)
        compare(copied(mixed), copied(mixed, parts=parts))
    print("equal")
