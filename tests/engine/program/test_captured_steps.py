"""Captured steps on a CPU, where a CUDA graph is a function that is called again: same ids as launched eagerly."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata import LLM, SamplingParams
from strata.cache.staging import Staging
from strata.cache.tables import BufferShape
from strata.engine.captured_steps import CapturedSteps
from strata.engine.plan import StepPlan, Tags
from strata.engine.process.messages import Step
from strata.engine.program import sizes as sizes_of_steps
from strata.engine.program.program import StepChoice, StepProgram
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes, captured_sizes
from strata.engine.request import Request
from strata.engine.runner import Runner
from strata.graph import cudagraph
from strata.kernels.attention import query_chunks
from strata.models.batch import Batch
from strata.serve.observe.metrics import Metrics
from tests.engine.process.desk import A, Desk
from tests.serve.observe.test_metrics import samples

MOST, LONGEST = 8, 96
OPTIONS: dict[str, Any] = {"device": "cpu", "max_num_seqs": MOST, "max_num_batched_tokens": LONGEST, "seed": 1}


class Replayed:
    """In place of `CudaGraphs`. What a CUDA graph reads must stay where it was, so nothing is told to it again.

    breaks: by which error the CUDA graph of a key is broken off, if by any.
    """

    def __init__(self, breaks: Callable[[Any], Exception | None] = lambda key: None) -> None:
        self.runs: dict[Hashable, Callable[[], None]] = {}
        self.replayed: list[Hashable] = []
        self.warm: list[bool] = []
        self._breaks = breaks

    def capture_graph(self, key: Hashable, run: Callable[[], None], warm: bool = False) -> None:
        self.warm.append(warm)
        run()
        error = self._breaks(key)
        if error is not None:
            raise error
        self.runs[key] = run

    def discard(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            self.runs.pop(key, None)

    def replay(self, key: Hashable) -> None:
        self.replayed.append(key)
        self.runs[key]()

    def lend(self, tensor: Tensor) -> Tensor:
        return tensor


SIZES = captured_sizes(MOST, LONGEST, 10**6, library=False)


def recording(
    folder: Path, monkeypatch: pytest.MonkeyPatch, graphs: Replayed, kernels_are_ready: bool = False
) -> tuple[LLM, CapturedSteps]:
    """An engine whose steps are captured in `graphs`, and whose device has memory of its own, as on CUDA."""
    as_on_cuda(monkeypatch, graphs)
    llm = LLM(folder, **OPTIONS)
    return llm, recorded_by(llm, SIZES, kernels_are_ready=kernels_are_ready)


def as_on_cuda(monkeypatch: pytest.MonkeyPatch, graphs: Replayed) -> None:
    """Inputs travel to memory of the device's own, and steps are captured in `graphs`."""
    monkeypatch.setattr(Runner, "_captured_graphs", lambda self: graphs)
    monkeypatch.setattr(Staging, "target", lambda self, size: torch.full((size,), -77, dtype=torch.int32))
    monkeypatch.setattr(Staging, "send", lambda self, target: target.copy_(self.host[: len(target)]))


def recorded_by(llm: LLM, sizes: Iterable[BufferShape], **options: Any) -> CapturedSteps:
    """What the runner of an engine records, whose block tables have memory of their own."""
    runner: Any = llm.engine.loop._runner
    others = [] if runner._windows is None else [tables for _, tables, _ in runner._windows._others]
    for tables in (runner._tables, *others):
        tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
    of_groups = [replace(size, groups=1 + len(others)) for size in sizes]
    found: CapturedSteps = runner.capture(StepSizes(of_groups, 1 << 20), **options)
    return found


@pytest.fixture
def captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, Replayed]:
    """An engine whose steps are all captured."""
    graphs = Replayed()
    return recording(folder, monkeypatch, graphs)[0], graphs


def requests() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    draw = random.Random(3)
    prompts = [[draw.randrange(250) for _ in range(draw.choice([1, 2, 15, 16, 17, 40, 90, 200]))] for _ in range(30)]
    shared = [draw.randrange(250) for _ in range(48)]
    prompts += [shared + prompt[:20] for prompt in prompts[:8]]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.9]),
            seed=number,
            max_tokens=draw.randrange(1, 20),
            ignore_eos=True,
            n=draw.choice([1, 1, 1, 3]),
            top_k=draw.choice([0, 5]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        )
        for number in range(len(prompts))
    ]
    return [{"prompt_token_ids": prompt} for prompt in prompts], params


def ids(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(*requests(), use_tqdm=False)
    return [sample.token_ids for output in outputs for sample in output.outputs]


def test_the_same_ids_as_eagerly(captured: tuple[LLM, Replayed], folder: Path) -> None:
    llm, graphs = captured
    wanted = ids(LLM(folder, **OPTIONS))
    assert ids(llm) == wanted
    sizes = {key[0] for key in graphs.replayed}
    assert len(sizes) > 3
    assert {key[1] for key in graphs.replayed} == {"run", "draw"}


def test_steps_run_what_the_program_chooses(captured: tuple[LLM, Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, graphs = captured
    chosen: list[BufferShape | None] = []
    choose = StepProgram.choose

    def noted(program: StepProgram, shape: StepShape) -> StepChoice:
        choice = choose(program, shape)
        chosen.append(choice.size)
        return choice

    monkeypatch.setattr(StepProgram, "choose", noted)
    ids(llm)
    assert [key[0] for key in graphs.replayed if key[1] == "run"] == [size for size in chosen if size is not None]


def in_divided_steps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, graphs: Replayed | None = None
) -> tuple[LLM, Replayed]:
    """An engine whose steps of up to two prompts divide them for the library."""
    monkeypatch.setattr(sizes_of_steps, "LIBRARY_TOKENS", 32)
    monkeypatch.setattr(sizes_of_steps, "MAX_PROMPTS", 2)
    sizes = captured_sizes(MOST, LONGEST, 10**6, library=True)
    assert {size.prompts for size in sizes if size.tokens != size.sequences} == {2, None}
    monkeypatch.setattr("tests.engine.program.test_captured_steps.SIZES", sizes)
    graphs = graphs or Replayed()
    return recording(folder, monkeypatch, graphs)[0], graphs


def test_the_same_ids_where_few_prompts_are_divided(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, graphs = in_divided_steps(folder, monkeypatch)
    assert ids(llm) == ids(LLM(folder, **OPTIONS))
    mixed = {key[0] for key in graphs.replayed if key[0].tokens != key[0].sequences}
    assert {size.prompts for size in mixed} == {2, None}


@pytest.fixture
def pure_prefill_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for pure prefill steps of up to two prompts, whose last is continued to a whole block of 16 keys."""
    for name, value in (("LIBRARY_TOKENS", 32), ("_PURE_PREFILL_TOKENS", 32), ("MAX_PROMPTS", 2)):
        monkeypatch.setattr(sizes_of_steps, name, value)
    monkeypatch.setattr(query_chunks, "KEY_BLOCK", 16)
    sizes = captured_sizes(MOST, LONGEST, 10**6, library=True, pure_prefill=True)
    assert [size for size in sizes if size.pure_prefill] == [
        BufferShape(tokens, 3, 2, 2, pure_prefill=True) for tokens in (32, 64, LONGEST)
    ]
    monkeypatch.setattr("tests.engine.program.test_captured_steps.SIZES", sizes)


@pytest.mark.usefixtures("pure_prefill_sizes")
def test_the_same_ids_where_prompts_are_fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request alone, and then all, which share steps with decodes."""
    graphs = Replayed()
    llm, _ = recording(folder, monkeypatch, graphs)
    other = LLM(folder, **OPTIONS)
    for prompt, params in zip(*requests(), strict=True):
        one, wanted = (each.generate(prompt, params, use_tqdm=False)[0] for each in (llm, other))
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in wanted.outputs]
    assert ids(llm) == ids(other)
    mixed = {key[0] for key in graphs.replayed if key[0].tokens != key[0].sequences}
    assert {(size.prompts, size.pure_prefill) for size in mixed} == {(2, True), (2, False), (None, False)}


@pytest.mark.usefixtures("pure_prefill_sizes")
def test_pure_prefill_steps_take_a_size_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are divided by their rows, and read nothing of pages."""
    graphs = Replayed()
    llm, _ = recording(folder, monkeypatch, graphs)
    runner: Any = llm.engine.loop._runner
    given: list[tuple[bool, int | None]] = []
    logits = runner.program.logits.forward

    def noted(batch: Batch, rows: Tensor) -> Tensor:
        parts = batch.pages.parts
        if parts.query_chunks is not None:
            given.append((parts.query_chunks.rows.pure_prefill, parts.decodes))
        return logits(batch, rows)

    monkeypatch.setattr(runner.program.logits, "forward", noted)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    first = 0
    for lengths, size in (
        ((32,), BufferShape(32, 3, 2, 2, pure_prefill=True)),
        ((30,), BufferShape(32, 3, 2, 2, pure_prefill=True)),
        ((1, 31), BufferShape(32, MOST + 1, MOST, 2)),  # the last block of keys would end behind the last row
        ((21, 32), BufferShape(64, 3, 2, 2, pure_prefill=True)),
        ((90, 6), BufferShape(LONGEST, MOST + 1, MOST, 2)),
        ((80, 16), BufferShape(LONGEST, 3, 2, 2, pure_prefill=True)),
        ((20, 20, 20), BufferShape(LONGEST, MOST + 1, MOST)),
        ((90, 102), BufferShape(LONGEST, MOST + 1, MOST, 2)),
    ):
        graphs.replayed.clear()
        given.clear()
        prompts = []
        for length in lengths:
            prompts.append({"prompt_token_ids": [first + number for number in range(length)]})
            first = (first + 7) % 100
        llm.generate(prompts, params, use_tqdm=False)
        ran = [key[0] for key in graphs.replayed if key[1] == "run"]
        assert ran[0] == size, lengths
        if size.prompts is not None:
            assert given[0] == (size.pure_prefill, 0 if size.pure_prefill else None)
        assert not any(one.pure_prefill for one in ran[1:])  # the rest of a prompt has keys in pages


@pytest.mark.usefixtures("pure_prefill_sizes")
def test_a_pure_prefill_size_that_memory_does_not_suffice_for_is_not_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = Replayed(lambda key: torch.OutOfMemoryError("CUDA out of memory.") if key[0].pure_prefill else None)
    llm, found = recording(folder, monkeypatch, replayed)
    assert len(found.lacking) == 3
    assert ids(llm) == ids(LLM(folder, **OPTIONS))
    assert found.uncaptured["out_of_memory"] == 0


def test_steps_take_a_size_for_as_many_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, graphs = in_divided_steps(folder, monkeypatch)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for count in (1, 2, 3):
        graphs.replayed.clear()
        prompts = [{"prompt_token_ids": [10 * count + number] * 21} for number in range(count)]
        llm.generate(prompts, params, use_tqdm=False)
        ran = [key[0] for key in graphs.replayed if key[1] == "run"]
        assert [size.prompts for size in ran] == [2 if count < 3 else None]
        assert ran[0].tokens == {1: 32, 2: 64, 3: LONGEST}[count]


def test_only_the_prompt_of_a_scored_sequence_is_launched_eagerly(
    captured: tuple[LLM, Replayed], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = captured
    eager: list[StepPlan] = []
    runner: Any = llm.engine.loop._runner
    launch = runner._launch_eager
    monkeypatch.setattr(runner, "_launch_eager", lambda plan, *more: eager.append(plan) or launch(plan, *more))
    # The second prompt comes in chunks beside the first request, which decodes then.
    prompts = [{"prompt_token_ids": [7] * 20}, {"prompt_token_ids": [9] * 230}]
    params = [
        SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=scored, ignore_eos=True) for scored in (1, None)
    ]
    found, wanted = (one.generate(prompts, params, use_tqdm=False) for one in (llm, LLM(folder, **OPTIONS)))
    assert [plan.chunks[0].start for plan in eager] == [0]
    for mine, other in zip(found, wanted, strict=True):
        assert mine.outputs[0].token_ids == other.outputs[0].token_ids
        assert mine.prompt_logprobs == other.prompt_logprobs


def short_of_memory(
    graphs: str, least: int, error: Callable[[], Exception] = lambda: torch.OutOfMemoryError("CUDA out of memory.")
) -> Replayed:
    """Has no memory for those graphs, "run" or "draw", of steps of at least so many tokens."""
    return Replayed(lambda key: error() if key[1] == graphs and key[0].tokens >= least else None)


@pytest.mark.parametrize("graphs", ["run", "draw"])
@pytest.mark.parametrize("least", [1, 5, 64])
def test_sizes_that_memory_does_not_suffice_for_are_launched_eagerly(
    graphs: str, least: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = short_of_memory(graphs, least)
    llm, found = recording(folder, monkeypatch, replayed)
    lacking = [size for size in SIZES if size.tokens >= least]
    assert sorted(found.lacking, key=SIZES.index) == lacking
    assert len(found.sizes) == len(SIZES) - len(lacking)
    # Decodes may be all that is replayed: then no step with a prompt is told to be.
    runner: Any = llm.engine.loop._runner
    assert runner.program.sizes.mixed_tokens == tuple(tokens for tokens in (32, 64, 96) if tokens < least)
    kept = {key[0] for key in replayed.runs}
    assert kept == set(found._buffers) == set(found._outputs) == set(SIZES) - set(lacking)
    assert ids(llm) == ids(LLM(folder, **OPTIONS))
    assert found.uncaptured["out_of_memory"] > 0
    assert found.uncaptured["too_large"] == found.uncaptured["prompt_logprobs"] == 0
    assert bool(replayed.replayed) == (least > 1)
    assert all(key[0].tokens < least for key in replayed.replayed if isinstance(key, tuple))


def test_steps_that_are_launched_eagerly_divide_few_prompts_as_recorded_ones_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tables of all columns, for which alone there is a plan."""
    llm, graphs = in_divided_steps(folder, monkeypatch, short_of_memory("run", 9))
    runner: Any = llm.engine.loop._runner
    given: list[tuple[int, int, bool]] = []
    logits = runner.program.logits.forward

    def noted(batch: Batch, rows: Tensor) -> Tensor:
        parts, columns = batch.pages.parts, batch.pages.tables.shape[1]
        if parts is not None:
            prompts = int(parts.bounds[1] - parts.bounds[0])
            given.append((len(batch.tokens), prompts, parts.query_chunks is not None))
            assert parts.decodes == int(parts.bounds[0]) == int((parts.decode_lengths > 0).sum())
            if parts.query_chunks is not None:
                assert columns == runner._tables.rows.shape[1]
                rows_of_prompts = len(batch.tokens) - parts.decodes
                assert int(parts.query_chunks.lengths[0].sum()) == rows_of_prompts
        return logits(batch, rows)

    monkeypatch.setattr(runner.program.logits, "forward", noted)
    assert ids(llm) == ids(LLM(folder, **OPTIONS))
    assert not any(key[0].tokens > 8 for key in graphs.replayed if isinstance(key, tuple))
    assert {virtual for _, _, virtual in given} == {True, False}
    for tokens, prompts, virtual in given:
        assert virtual == (tokens >= 32 and prompts <= 2)


def test_what_a_broken_off_recording_should_have_warmed_is_warmed_by_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for graphs, warm in ((Replayed(), True), (short_of_memory("run", LONGEST), False)):
        _, found = recording(folder, monkeypatch, graphs)
        graphs.warm.clear()
        found.capture(SIZES[-1])
        assert graphs.warm[0] == warm


def test_few_sizes_are_run_before_where_kernels_are_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Replayed()
    llm, found = recording(folder, monkeypatch, graphs, kernels_are_ready=True)
    assert graphs.warm.count(False) == 2 * 2  # of decodes and of others one, with its draws
    assert set(found.sizes) == set(SIZES)
    assert ids(llm) == ids(LLM(folder, **OPTIONS))


class Cold(Replayed):
    """What has not been run first cannot be captured, by an error that is no lack of memory or one that is."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def capture_graph(self, key: Hashable, run: Callable[[], None], warm: bool = False) -> None:
        super().capture_graph(key, run, warm)
        if warm:
            del self.runs[key]
            raise self._error


def test_what_cannot_be_recorded_without_a_run_is_run_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Cold(RuntimeError("operation not permitted when stream is capturing"))
    llm, found = recording(folder, monkeypatch, graphs, kernels_are_ready=True)
    assert set(found.sizes) == set(SIZES)
    assert not found.lacking
    assert ids(llm) == ids(LLM(folder, **OPTIONS))
    found = recording(folder, monkeypatch, Cold(torch.OutOfMemoryError("out of memory")), kernels_are_ready=True)[1]
    assert found.lacking


def test_other_errors_end_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = short_of_memory("run", 5, lambda: RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        recording(folder, monkeypatch, replayed)


def test_a_line_says_how_many_sizes_are_not_recorded_and_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, captured: tuple[LLM, Replayed]
) -> None:
    assert captured[0].engine.loop._runner._captured.shortage("H200") is None
    _, found = recording(folder, monkeypatch, short_of_memory("draw", 64))
    line = found.shortage("H200")
    assert line is not None
    assert line.startswith(f"out of memory on H200: {len(found.lacking)} of {len(SIZES)} sizes of steps, ")
    assert "64 to 96 tokens" in line
    assert "lower gpu_memory_utilization" in line
    assert "\n" not in line


def test_steps_that_are_not_recorded_are_counted_by_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.program.test_captured_steps.SIZES", [size for size in SIZES if size.tokens <= 64])
    llm, found = recording(folder, monkeypatch, Replayed())
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for length in (60, 80, 200):  # the last one in chunks of 96, 96 and 8
        llm.generate({"prompt_token_ids": [length] * length}, params, use_tqdm=False)
    assert found.uncaptured == {"too_large": 3, "prompt_logprobs": 0, "tags": 0, "out_of_memory": 0}
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    llm.generate({"prompt_token_ids": [20] * 20}, params, use_tqdm=False)
    llm.engine.loop.add(Request("a", (20,) * 20, SamplingParams(max_tokens=2, ignore_eos=True), tags=Tags("adapter")))
    assert len([*llm.engine.loop.outputs()]) == 2
    assert found.uncaptured == {"too_large": 3, "prompt_logprobs": 1, "tags": 2, "out_of_memory": 0}


def test_counts_travel_to_the_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, found = recording(folder, monkeypatch, short_of_memory("draw", LONGEST))
    llm._engine = replace(llm.engine, captured=found)
    desk = Desk(llm, A)
    found.uncaptured |= {"too_large": 4, "prompt_logprobs": 2, "out_of_memory": 3}
    desk.run()
    told = desk.of(A, Step)[-1].statistics
    assert (told.recorded_sizes, told.too_large, told.scored, told.not_captured) == (len(found.sizes), 4, 2, 3)
    read = samples(Metrics("m").render(told))
    assert read["strata_recorded_sizes"] == len(SIZES) - len(found.lacking) > 0
    name = "strata_unrecorded_steps_total"
    assert {key: read[key] for key in read if key.startswith(name)} == {
        f"{name}{{reason=too_large}}": 4,
        f"{name}{{reason=prompt_logprobs}}": 2,
        f"{name}{{reason=out_of_memory}}": 3,
    }


def test_what_kernels_share_is_there_before_anything_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters that are zeroed within a CUDA graph are so after its replay; others that run before it would count
    on."""
    made: list[Any] = []
    cuda = SimpleNamespace(graph_pool_handle=lambda: (0, 1), Stream=lambda: None, current_device=lambda: 3)
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(cudagraph, "split_counters", made.append)
    cudagraph.CudaGraphs()
    assert made == [torch.device("cuda", 3)]
