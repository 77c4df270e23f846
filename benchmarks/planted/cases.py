"""The planted cases: what is wrong with each engine or run, what its explanation has to say, and what mends it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from strata.bench.explain.measure import BenchWorkload
from strata.bench.workloads import InferenceTest, random_prompts
from strata.engine.llm import LLM
from strata.plan.explain.explanation import Subject

# What a slow host loop takes more for each step, and a slow tokenizer for each prompt, in seconds.
_SLOW_LOOP, _SLOW_PROMPT = 0.02, 0.03


def nothing(llm: LLM) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Case:
    """symptom: words of the verdict. options: of the engine with the fault; mended: those without it, beside the run's.
    around: the fault while the engine starts, and, if it `lasts`, until its runs are over; during: in each run of it.
    needs_cuda: it is none on a CPU. by_wall: the wall
    clock tells it, where others go by the processor's time. texts: prompts come as text."""

    name: str
    symptom: str
    workload: BenchWorkload
    options: Mapping[str, Any] = field(default_factory=dict)
    mended: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    during: Callable[[LLM], AbstractContextManager[Any]] = nothing
    mended_workload: BenchWorkload | None = None
    subject: Subject = "run"
    needs_cuda: bool = False
    lasts: bool = False
    by_wall: bool = False
    texts: bool = False


def even(count: int, prompt: int, output: int) -> BenchWorkload:
    return BenchWorkload(InferenceTest("planted", random_prompts(count, prompt), (output,) * count, temperature=0.0))


def with_outputs(count: int, prompt: int, outputs: tuple[int, ...]) -> BenchWorkload:
    return BenchWorkload(InferenceTest("planted", random_prompts(count, prompt), outputs, temperature=0.0))


def alike(count: int, shared: int, prompt: int, output: int) -> BenchWorkload:
    prompts = random_prompts(count, prompt)
    begun = tuple(prompts[0][:shared] + one[shared:] for one in prompts)
    return BenchWorkload(InferenceTest("planted", begun, (output,) * count, temperature=0.0))


def spin(seconds: float) -> None:
    """Keep the processor for so long."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@contextmanager
def slow_loop(llm: LLM) -> Iterator[None]:
    scheduler = llm.engine.loop.scheduler
    schedule = scheduler.schedule

    def slowly(*began: float) -> Any:
        spin(_SLOW_LOOP)
        return schedule(*began)

    with patch.object(scheduler, "schedule", slowly):
        yield


@contextmanager
def slow_tokenizer(llm: LLM) -> Iterator[None]:
    tokenizer = llm.get_tokenizer()
    encode = tokenizer.encode

    def slowly(*arguments: Any, **options: Any) -> list[int]:
        spin(_SLOW_PROMPT)
        return encode(*arguments, **options)

    with patch.object(tokenizer, "encode", slowly):
        yield


@contextmanager
def _processes(code: str, count: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for one in others:
            assert one.stdout is not None
            one.stdout.readline()  # it is at work
        yield
    finally:
        for one in others:
            one.kill()
            one.wait()


@contextmanager
def busy_processors(llm: LLM) -> Iterator[None]:
    import os

    code = "print('at work', flush=True)\nwhile True: pass"
    with _processes(code, 2 * len(os.sched_getaffinity(0))):
        yield


def other_process_on_gpu() -> AbstractContextManager[None]:
    """Products without end, and 4 GiB."""
    code = (
        "import torch\nheld = torch.empty(4 << 30, dtype=torch.uint8, device='cuda')\n"
        "x = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16)\nprint('at work', flush=True)\n"
        "while True:\n    for _ in range(20): x @ x\n    torch.cuda.synchronize()"
    )
    return _processes(code, 1)


@contextmanager
def no_captured_steps(llm: LLM) -> Iterator[None]:
    from strata.engine.program.sizes import StepSizes

    with patch.object(StepSizes, "holding", lambda sizes, shape: None):
        yield


USUAL = even(16, 64, 24)
LONG = (16,) * 15 + (240,)
CASES = (
    Case("slow host loop", "waits for the host between steps", USUAL, during=slow_loop),
    Case("eager launches", "launches by the host", USUAL, during=no_captured_steps, needs_cuda=True),
    # On a CPU the passes save 0 to 7 %, no more than runs differ by: its operations call the same functions of torch.
    Case("unfused graph", "run one by one", USUAL, {"passes": "none"}, {"passes": "all"}, needs_cuda=True),
    Case(
        "float32 where bf16 was asked", "was asked for", even(8, 512, 8), {"dtype": "float32"}, {"dtype": "bfloat16"}
    ),
    Case("tiny KV pool", "KV capacity", even(16, 64, 96), {"num_pages": 64}),
    Case(
        "no prefix cache on a shared prefix",
        "beginnings were computed before",
        alike(16, 384, 448, 8),
        {"enable_prefix_caching": False},
        {"enable_prefix_caching": True},
    ),
    Case(
        "huge chunks",
        "wait for the prompts of others",
        with_outputs(32, 448, tuple(8 + index % 24 for index in range(32))),
        {"max_num_seqs": 8},
        {"max_num_seqs": 8, "max_num_batched_tokens": 64},
        subject="tail",
    ),
    Case(
        "one long tail request",
        "run on after all others",
        with_outputs(16, 64, LONG),
        mended_workload=even(16, 64, 16),
    ),
    Case("CPU contention", "takes the processors", USUAL, during=busy_processors, by_wall=True),
    Case("batch cap", "fewer sequences run at once", USUAL, {"max_num_seqs": 2}),
    Case("slow tokenizer", "prompts become ids", USUAL, during=slow_tokenizer, texts=True),
    Case(
        "another process on the GPU", "the device is shared", USUAL, around=other_process_on_gpu, needs_cuda=True,
        lasts=True, by_wall=True,
    ),
)  # fmt: skip
