"""The Triton kernels of attention over chosen pages in Triton's interpreter, against the reference, for `interpreted`.

What is tested is the division, the pages and the order of the sums: the interpreter computes in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from strata.kernels.attention.batch_parts import BatchParts
from strata.kernels.attention.sparse import decodes_cuda
from strata.kernels.attention.sparse.decodes import page_sparse_attention
from strata.kernels.attention.spec import SparseCall
from tests.kernels.attention.sparse.test_decodes import CHOICE, SINKS, SPEC, with_bounds
from tests.kernels.attention.test_attention import Case


def copied(given: tuple[Any, ...], **parts: BatchParts) -> tuple[Any, ...]:
    *vectors, batch = given
    pages = replace(batch.pages, bounds=tuple(one.clone() for one in batch.pages.bounds), **parts)
    return *vectors, batch._replace(pages=pages)


def compare(given: tuple[Any, ...], alike: tuple[Any, ...]) -> None:
    wanted = page_sparse_attention.reference(*given, SPEC, CHOICE, SINKS)
    found = decodes_cuda.attend(SparseCall(*alike, SPEC, CHOICE, SINKS))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(alike[3].pages.bounds, given[3].pages.bounds, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def decodes_alone() -> None:
    """Of the second sequence no key has a positive score."""
    case = Case.random([40, 100], heads=6, kv_heads=2, head_dim=12)
    case.q[1].abs_()
    case.k[1].sub_(6)
    given = with_bounds(case.batch([1, 1], layers=2))
    compare(given, copied(given))


def recorded_step_with_a_prompt() -> None:
    """Of which only the device knows how many decode."""
    case = Case.random([40, 90, 25], heads=6, kv_heads=2, head_dim=12)
    given = with_bounds(case.batch([1, 1, 7], layers=2))
    lengths = given[3].pages.lengths.clone()
    lengths[2] = 0
    parts = BatchParts(lengths, torch.tensor([1, 2, 2]).int(), torch.tensor([2, 3]).int())
    compare(given, copied(given, parts=parts))


def compare_pages() -> None:
    decodes_cuda._LEAST_PLACES = 8
    decodes_cuda.SCORED_PAGES, decodes_cuda._SCORE_PROGRAMS = 2, 8  # so that programs score pages more than once
    decodes_alone()
    recorded_step_with_a_prompt()
