"""Runs cases on an engine and predicts their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from strata.bench.explain.measure import Workload, facts, measured_steps
from strata.bench.predictions.cases import Case, cases
from strata.bench.predictions.errors import StepError, step_errors
from strata.plan.step_seconds import StepSeconds

if TYPE_CHECKING:
    from strata.engine.llm import LLM


def fitting(llm: LLM, options: Mapping[str, Any], times: StepSeconds) -> list[Case]:
    """The cases that an engine's model, slots and memory allow. options: that the engine was asked for."""
    engine = facts(llm, options, times)
    return [
        case
        for case in cases()
        if case.longest <= engine.max_length
        and case.tokens + case.count * engine.page_size <= engine.kv_tokens
        and case.count <= engine.slots
    ]


def predicted_and_measured(
    llm: LLM, chosen: Iterable[Case], times: StepSeconds, repeat: int
) -> Iterator[list[StepError]]:
    """Of each case, run so often and once more before."""
    for case in chosen:
        workload = Workload(case.test())
        measured_steps(llm, workload)
        yield step_errors(case.name, [measured_steps(llm, workload) for _ in range(repeat)], times)
