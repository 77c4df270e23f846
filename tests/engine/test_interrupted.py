"""Ctrl-C or an exception at any moment of `LLM.generate` or `LLM.stream`: nothing uncomputed is ever found again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.engine import delivery, loop
from strata.engine.collect import Collector
from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.engine.runner import Launched
from strata.engine.scheduling import admission, builder, prefixes, queues, scheduler

PROMPT = {"prompt_token_ids": [(7 * place) % 300 for place in range(75)]}
OTHER = {"prompt_token_ids": [(11 * place) % 300 for place in range(40)]}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_pages": 60, "max_num_batched_tokens": 32}


def ids_of(llm: LLM, prompt: dict[str, list[int]] = PROMPT, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return ids_of(LLM(folder, enable_prefix_caching=False, **OPTIONS))


@pytest.fixture(scope="module")
def shared(folder: Path) -> LLM:
    return LLM(folder, **OPTIONS)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def llm(shared: LLM, request: pytest.FixtureRequest) -> LLM:
    """Nothing is cached in it."""
    shared.engine.loop._run_ahead = request.param
    shared.engine.loop.scheduler.reset()
    return shared


def assert_nothing_is_left(llm: LLM) -> None:
    of, allocator = llm.engine.loop.scheduler, llm.engine.pages
    assert llm.engine.loop.idle
    of.check()
    assert of.running == of.waiting == 0
    assert allocator.free + allocator.idle == allocator.num_pages


@contextmanager
def raising(owner: Any, name: str, call: int, error: type[BaseException], after: bool) -> Iterator[None]:
    """The call-th call of a function raises, before or after it has done its work."""
    original, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != call:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise error("stop here")

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, original)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("where", ["schedule", "complete", "launch", "wait", "append"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_prompt_answers_rightly_after_a_step_that_came_to_nothing(
    llm: LLM, expected: list[int], where: str, call: int, after: bool, error: type[BaseException]
) -> None:
    steps = llm.engine.loop
    owner = {"launch": steps._runner, "wait": Launched, "append": Collector}.get(where, steps.scheduler)
    with raising(owner, where, call, error, after), pytest.raises(error, match="stop here"):
        ids_of(llm)
    assert_nothing_is_left(llm)
    assert ids_of(llm) == expected
    assert ids_of(llm) == expected
    assert_nothing_is_left(llm)


Trace = Callable[[FrameType, str, Any], Any]


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def lines_of(modules: list[Any], run: Callable[[], object]) -> dict[tuple[CodeType, int], None]:
    """The lines of some modules that a run passes, in order of their first time."""
    files = {module.__file__ for module in modules}
    seen: dict[tuple[CodeType, int], None] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            seen[frame.f_code, frame.f_lineno] = None
        return trace if frame.f_code.co_filename in files else None

    with tracing(trace):
        run()
    return seen


def interrupting(code: CodeType, line: int) -> Trace:
    """Raises KeyboardInterrupt before a line is run for the first time."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace if frame.f_code is code else None

    return trace


def test_an_interrupt_at_any_line_of_scheduler_and_loop_leaves_a_usable_engine(
    shared: LLM, expected: list[int]
) -> None:
    """Python raises KeyboardInterrupt between any two lines, so books that are half written are met as well."""
    shared.engine.loop._run_ahead = True
    two = SamplingParams(temperature=0, max_tokens=2, n=2, ignore_eos=True)
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def run() -> None:
        shared.generate([PROMPT, OTHER, PROMPT], two, use_tqdm=False)

    lines = lines_of([scheduler, admission, builder, queues, prefixes, loop, delivery], run)
    assert len(lines) > 150
    for code, line in lines:
        with suppress(KeyboardInterrupt), tracing(interrupting(code, line)):
            run()
        assert ids_of(shared, params=one) == expected[:1], f"after an interrupt at {code.co_qualname}, line {line}"
        assert_nothing_is_left(shared)


def test_a_draw_under_a_grammar_that_came_to_nothing_leaves_the_masks_usable(llm: LLM) -> None:
    asked = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,6}"))
    want = ids_of(llm, params=asked)
    for call in (1, 3):
        with raising(llm.engine.loop._runner, "draw", call, KeyboardInterrupt, False), suppress(KeyboardInterrupt):
            ids_of(llm, params=asked)
        assert_nothing_is_left(llm)
        assert ids_of(llm, params=asked) == want


def test_leaving_a_stream_between_two_steps_leaves_nothing_uncomputed(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert_nothing_is_left(llm)
    assert ids_of(llm) == expected


def test_a_stream_whose_leaving_is_interrupted_ends_before_the_next_step(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(OTHER, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    next(stream)
    with raising(llm.engine.loop, "abort", 1, KeyboardInterrupt, False), pytest.raises(KeyboardInterrupt):
        stream.close()  # type: ignore[attr-defined]
    with raising(llm.engine.loop, "step", 30, AssertionError, False):
        assert ids_of(llm) == expected
    assert_nothing_is_left(llm)


def test_who_did_not_step_learns_that_its_request_has_ended(llm: LLM, expected: list[int]) -> None:
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    with raising(llm.engine.loop._runner, "launch", 1, KeyboardInterrupt, False), pytest.raises(KeyboardInterrupt):
        ids_of(llm, OTHER)
    with pytest.raises(RuntimeError, match="ended unfinished"):
        next(stream)
    assert ids_of(llm) == expected
    assert_nothing_is_left(llm)
