"""Requests whose steps are measured and predicted: decodes, prompts and both, of sizes that no table was made at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.predictions.errors import StepError, step_errors
from strata.bench.explain.measure import BenchWorkload, facts, measured_steps
from strata.bench.workloads import InferenceTest, random_prompts
from strata.cost.step_model import StepModel
from strata.text.counted import counted

if TYPE_CHECKING:
    from strata.engine.llm import LLM

# Decode steps of each case, of which the median counts.
_STEPS = 8
_DECODES = (1, 2, 3, 6, 11, 24, 48, 90, 160, 250)
_CONTEXTS = (60, 700, 2900, 11_000)
# (prompts, tokens of each).
_PROMPTS = (
    (1, 32), (1, 90), (1, 230), (1, 500), (1, 900), (1, 1700), (1, 3100), (1, 6000), (1, 12_000), (1, 16_000),
    (2, 150), (4, 330), (5, 1200), (16, 480), (40, 100), (100, 60), (9, 2000),
)  # fmt: skip
# (decodes, tokens that each has, tokens of the prompt that comes behind them).
_MIXED = (
    (1, 100, 9000), (4, 700, 11_000), (10, 50, 13_000), (20, 300, 15_000), (50, 130, 16_000), (100, 60, 16_000),
    (150, 20, 15_500), (3, 2400, 12_000),
)  # fmt: skip


@dataclass(frozen=True)
class PredictionCase:
    """Requests that come at once. name: for people. requests: (how many, tokens of each prompt, and of its output)."""

    name: str
    requests: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        return sum(count for count, _, _ in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(prompt + output for _, prompt, output in self.requests)

    @property
    def tokens(self) -> int:
        """Keys and values that they hold in the end."""
        return sum(count * (prompt + output) for count, prompt, output in self.requests)

    def test(self) -> InferenceTest:
        """With prompts: those of the largest case are millions of ids."""
        prompts = [prompt for count, tokens, _ in self.requests for prompt in random_prompts(count, tokens)]
        outputs = [output for count, _, output in self.requests for _ in range(count)]
        return InferenceTest(self.name, tuple(prompts), tuple(outputs), temperature=0.0)


def cases() -> Iterator[PredictionCase]:
    """Decodes first, then prompts, then prompts beside decodes."""
    for sequences in _DECODES:
        for context in _CONTEXTS:
            yield PredictionCase(
                f"{counted(sequences, 'decode')} over {counted(context, 'token')}", ((sequences, context, _STEPS),)
            )
    for count, tokens in _PROMPTS:
        yield PredictionCase(f"{counted(count, 'prompt')} of {counted(tokens, 'token')}", ((count, tokens, 1),))
    for sequences, context, tokens in _MIXED:
        # The first step is full before the long prompt ends, so its rest runs beside decodes.
        requests = ((sequences, context, _STEPS), (1, tokens, 1))
        yield PredictionCase(f"{counted(sequences, 'decode')}, a prompt of {counted(tokens, 'token')}", requests)


def fitting(llm: LLM, options: Mapping[str, Any], times: StepModel) -> list[PredictionCase]:
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
    llm: LLM, chosen: Iterable[PredictionCase], times: StepModel, repeat: int
) -> Iterator[list[StepError]]:
    """Of each case, run so often and once more before."""
    for case in chosen:
        workload = BenchWorkload(case.test())
        measured_steps(llm, workload)
        yield step_errors(case.name, [measured_steps(llm, workload) for _ in range(repeat)], times)
