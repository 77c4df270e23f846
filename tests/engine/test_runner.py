"""What the runner tells the kernels of a step."""

from __future__ import annotations

from typing import Any, cast

from strata.engine.runner import batch_parts
from strata.engine.scheduler import Chunk, StepPlan
from strata.kernels.paged import BatchParts


def plan(*parts: tuple[int, int]) -> StepPlan:
    """A plan of (tokens already computed, tokens to run)."""
    chunks = [Chunk(cast(Any, None), slot, start, count, (), 0, ()) for slot, (start, count) in enumerate(parts)]
    return StepPlan(tuple(chunks), (), sum(count for _, count in parts))


def test_decodes_then_prompts_that_go_on_then_prompts_that_start() -> None:
    assert batch_parts(plan((9, 1), (40, 1), (64, 30), (0, 500), (0, 7))) == BatchParts(2, (30,), (500, 7))
    assert batch_parts(plan((0, 12))) == BatchParts(0, (), (12,))
    assert batch_parts(plan((9, 1), (16, 100))) == BatchParts(1, (100,), ())


def test_a_prompt_of_one_token_runs_as_a_decoding_sequence() -> None:
    assert batch_parts(plan((9, 1), (0, 1), (0, 600))) == BatchParts(2, (), (600,))


def test_another_order_is_left_to_the_kernel_for_all() -> None:
    assert batch_parts(plan((0, 600), (9, 1))) is None
    assert batch_parts(plan((0, 600), (64, 30))) is None
