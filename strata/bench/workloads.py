"""The inference tests T1 to T4: prompts, output lengths, what they count, and the schedule that their floors are of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from strata.hardware.figures import Device
from strata.hardware.links import Link
from strata.hardware.roofline import Cost, Workload, steps_floor

# Prompts are ids from 0 to this, whatever the vocabulary (a smaller one takes the remainder).
LARGEST_ID = 10_000
MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class InferenceTest:
    """One test. Every request yields exactly its `outputs` tokens.

    prompts: ids of each request. outputs: tokens that each generates. temperature: of the sampling, 0 is greedy.
    counted: "output" or "prompt", the tokens that the figure counts. unit: "tok/s", or "ms" for milliseconds a token.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    temperature: float = 0.6
    counted: str = "output"
    unit: str = "tok/s"

    @property
    def prompt_lengths(self) -> tuple[int, ...]:
        return tuple(len(prompt) for prompt in self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(prompt + output for prompt, output in zip(self.prompt_lengths, self.outputs, strict=True))

    def value(self, seconds: float) -> float:
        """The figure, in `unit`, of a call that took so many seconds."""
        tokens = sum(self.outputs if self.counted == "output" else self.prompt_lengths)
        return 1e3 * seconds / tokens if self.unit == "ms" else tokens / seconds

    def floor(
        self, step: Callable[[Workload, int], Cost], device: Device, dtype: str, link: Link | None = None
    ) -> float:
        """Seconds of the ideal schedule; `step` is the least cost of a step with so many sampled rows."""
        steps = ideal_steps(self.prompt_lengths, self.outputs)
        return steps_floor((step(work, len(work.new)) for work in steps), device, dtype, link)


def ideal_steps(prompts: Sequence[int], outputs: Sequence[int]) -> Iterator[Workload]:
    """All prompts in one step, which yields every first token; then a token of each running sequence a step.

    Nothing reads the weights fewer times: every step is as full as the lengths allow.
    """
    yield Workload(tuple(prompts), tuple(prompts))
    for done in range(1, max(outputs)):
        lengths = tuple(prompt + done for prompt, output in zip(prompts, outputs, strict=True) if output > done)
        yield Workload((1,) * len(lengths), lengths)


def offline() -> InferenceTest:
    """T1: 256 requests with prompts and outputs of 100 to 1024 tokens (the benchmark of nano-vllm)."""
    rng = random.Random(0)
    prompts = tuple(tuple(rng.randint(0, LARGEST_ID) for _ in range(rng.randint(100, 1024))) for _ in range(256))
    outputs = tuple(rng.randint(100, 1024) for _ in range(256))
    return InferenceTest("T1", prompts, outputs)


def single() -> InferenceTest:
    """T2: one request, prompt 128, 512 output tokens, greedy."""
    return InferenceTest("T2", random_prompts(1, 128), (512,), temperature=0.0, unit="ms")


# Of T3, all of which come at once: the prompts of more take long to draw, and much memory.
MAX_REQUESTS = 10_000


def fixed_batch(requests: int) -> InferenceTest:
    """T3: so many requests with prompt 512 and 256 output tokens each."""
    return InferenceTest(f"T3-b{requests}", random_prompts(requests, 512), (256,) * requests)


def prefill() -> InferenceTest:
    """T4: 16 prompts of 2048 tokens, one output token each."""
    return InferenceTest("T4", random_prompts(16, 2048), (1,) * 16, counted="prompt")


def named(name: str, *, or_served: bool = False) -> InferenceTest:
    """The test of that name: T1, T2, T3-bN, T4. Raises ValueError for another. or_served: who asks takes T5 as well,
    and says so."""
    requests = name.removeprefix("T3-b")
    if requests.isdecimal() and int(requests) > 0 and requests != name:
        if len(requests) > len(str(MAX_REQUESTS)) or int(requests) > MAX_REQUESTS:
            raise ValueError(f"test {name!r} is too large: give T3-bN with N up to {MAX_REQUESTS}")
        return fixed_batch(int(requests))
    made = {"T1": offline, "T2": single, "T4": prefill}.get(name)
    if made is None:
        known = ", T4, or T5, a served load"
        if not or_served:
            known = " or T4 (T5, a served load, is of `strata explain`, `strata bench gaps` and `strata bench serve`)"
        raise ValueError(f"test {name!r} is unknown; give T1, T2, T3-bN (N requests, such as T3-b32){known}")
    return made()


def random_prompts(count: int, length: int) -> tuple[tuple[int, ...], ...]:
    """`count` prompts of `length` ids, the same in every run."""
    rng = random.Random(0)
    return tuple(tuple(rng.randint(0, LARGEST_ID) for _ in range(length)) for _ in range(count))
