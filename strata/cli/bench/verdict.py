"""What holds a test back, in the line that `strata bench` prints after its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.bench.run import Setup
from strata.bench.workloads import InferenceTest

if TYPE_CHECKING:
    from strata.engine.llm import LLM


def verdict_line(llm: LLM, test: InferenceTest, setup: Setup) -> str | None:
    """By one more run of the test. None where nothing tells what steps should take: of a GPU that is not in the
    database, of ranks on a processor, and of stages of a pipeline, whose steps overlap."""
    from strata.bench.explain.measure import Workload, measure
    from strata.bench.explain.predicted_steps import ideal_seconds, in_asked_dtype, predicted
    from strata.plan.explain.explain import explain

    if setup.pipeline_parallel_size > 1:
        return None
    try:
        times, _ = predicted(llm, setup)
    except ValueError:
        return None
    workload, options = Workload(test), setup.llm_options()
    short = workload.short() if llm.engine.device.type == "cpu" else None
    ideal = ideal_seconds(test, times)
    measured = measure(llm, workload, options, times, title=test.name, ideal=ideal, short=short)
    return explain(measured, times, wanted=in_asked_dtype(measured.facts, llm, setup, times)).verdict.line
