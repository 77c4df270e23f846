"""Steps whose inputs leave the host late or are replayed, and engines that are simulated: no step takes another's."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from strata import LLM
from strata.cache.pages import PageAllocator
from strata.cache.pool import KVPool
from strata.cache.prefix import PrefixTree
from strata.cache.staging import Staging
from strata.cache.tables import StepBuffer
from strata.engine.loop import EngineLoop
from strata.engine.plan import StepPlan
from strata.engine.request import Request
from strata.engine.runner import Launched, Runner
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.program.programs import plain_sizes
from tests.engine.simulated import LONGEST, SECONDS_A_STEP, Device, SimulatedRunner, linear, load, simulate, uncrowded

PROMPT = [(7 * place) % 300 for place in range(229)]


class Stream:
    """What a device has been given to do and has not done: it does as little as it is made to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self.done = 0

    def add(self, work: Callable[[], Any]) -> None:
        self.waiting.append(work)

    def catch_up(self, until: int | None = None) -> None:
        while self.waiting and (until is None or self.done < until):
            self.waiting.pop(0)()
            self.done += 1


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.until = stream, 0

    def record(self) -> None:
        self.until = self.stream.done + len(self.stream.waiting)

    def synchronize(self) -> None:
        self.stream.catch_up(self.until)


class LateStaging(Staging):
    """One whose copies are work of a stream."""

    def __init__(self, size: int, stream: Stream) -> None:
        super().__init__(size, torch.device("cpu"))
        self._stream, self._left = stream, Event(stream)  # type: ignore[assignment]

    def send(self, target: Tensor) -> None:
        self._stream.add(lambda: target.copy_(self.host[: len(target)]))
        assert self._left is not None
        self._left.record()


def fall_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Let steps that draw nothing wait until somebody waits for the device; others are what the host waits for."""
    stream, loop = Stream(), llm.engine.loop
    loop._run_ahead = True
    runner = loop._runner
    runner._staging = [LateStaging(len(staging.host), stream) for staging in runner._staging]
    program, build, send = runner.program, StepBuffer.batch, runner._send

    def late_logits(batch: Any, rows: Tensor) -> Tensor:
        if len(rows):
            return program.logits.forward(batch(), rows)
        stream.add(lambda: program.logits.forward(batch(), rows))
        return torch.empty(0, 307)

    def send_and_draw(buffer: StepBuffer, *given: Any) -> None:
        send(buffer, *given)
        if buffer.shape.draws:
            stream.catch_up()

    def late_batch(buffer: StepBuffer, pool: Any, tables: Any, *given: Any) -> Callable[[], Any]:
        return lambda: build(buffer, pool, tables() if callable(tables) else tables, *given)

    def late_inputs(step: Any) -> tuple[Tensor, Callable[[], Tensor]]:
        return step.tokens, lambda: program.prompt_inputs.forward(step)[1]

    late_graphs: Any = [SimpleNamespace(forward=run) for run in (late_logits, late_inputs)]
    variants = tuple(replace(one, graph=late_graphs[0]) for one in program.variants)
    monkeypatch.setattr(StepBuffer, "batch", late_batch)
    monkeypatch.setattr(runner, "program", replace(program, variants=variants, prompt_inputs=late_graphs[1]))
    monkeypatch.setattr(runner, "_send", send_and_draw)
    return stream


@pytest.mark.parametrize("chunk", [120, 80, 50, 20])
def test_chunks_that_draw_nothing_keep_their_inputs(chunk: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "num_pages": 60, "deterministic": True, "enable_prefix_caching": False}
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[::-1]}]
    wanted = LLM(folder, **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(folder, max_num_batched_tokens=chunk, **options)
    stream = fall_behind(llm, monkeypatch)
    for prompt, want in zip(prompts, wanted, strict=True):
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == want.outputs[0].token_ids
    assert stream.done >= 2 * (len(PROMPT) // chunk)


ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(StepPlan)


def asked(count: int) -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    source = random.Random(5)
    common = source.choices(range(1, 300), k=40)
    prompts, params = [], []
    for number in range(count):
        own = source.choices(range(1, 300), k=source.randint(1, 6))
        prompts.append({"prompt_token_ids": common[: source.choice([0, 8, 12])] + own})
        more: dict[str, Any] = {
            3: {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
            5: {"logprobs": 2, "prompt_logprobs": 1},
            7: {"logit_bias": {7: 3.0}, "min_tokens": 3, "stop_token_ids": [9, 11]},
            9: {"bad_words": ["fox jumps", "dog"]},
        }.get(number % 20, {})
        params.append(
            SamplingParams(
                n=source.choice([1, 1, 1, 3]),
                temperature=source.choice([0.0, 0.9]),
                top_p=source.choice([1.0, 0.8]),
                seed=number if number % 2 else None,
                max_tokens=16 if number < 40 else 3,
                **more,
            )
        )
    return prompts, params


def test_the_plans_of_a_run_alone_give_its_ids_again(folder: Path) -> None:
    options: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 128, "page_size": 4, "num_pages": 70}
    llm = LLM(folder, device="cpu", verbose=False, deterministic=True, **options)
    loop = llm.engine.loop
    loop._run_ahead = True
    runner: Any = loop._runner
    launch, frames = runner.launch, []

    def recording(plan: StepPlan) -> Any:
        frames.append(ENCODER.encode(plan))
        assert DECODER.decode(frames[-1]) == plan
        return launch(plan)

    runner.launch = recording
    prompts, params = asked(200)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counted = loop.scheduler.statistics
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0

    pool = KVPool(runner.pool.shape, runner.pool.pages, llm.engine.device)
    engine, sizes = llm.engine, plain_sizes(pool.shape, 32, 128, llm.engine.max_model_len)
    fresh = Runner(runner.program, sizes, engine.config, [pool], engine.device, engine.config.vocab_size)
    drawn: dict[int, list[int]] = {}
    for frame in frames:
        step = fresh.launch(DECODER.decode(frame))
        assert isinstance(step, Launched)
        for draw, id in zip(step.plan.draws, step.wait(), strict=True):
            drawn.setdefault(draw.sequence, []).append(id)
    samples = [sample.token_ids for output in outputs for sample in output.outputs]
    assert len(drawn) == len(samples)
    # Ids that were drawn beyond an end, while the host did not know it, are nobody's.
    assert [drawn[place][: len(ids)] for place, ids in enumerate(samples)] == samples


HOST = (
    "cache.pages",
    "cache.prefix",
    "engine.collect",
    "engine.faults",
    "engine.args.segments",
    "engine.loop",
    "engine.outputs",
    "engine.plan",
    "engine.scheduling.prefixes",
    "engine.request",
    "engine.scheduling.scheduler",
)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_requests_end_as_they_would_alone_in_the_time_that_their_steps_take(run_ahead: bool) -> None:
    requests = load(300)
    found = simulate(requests, pages=40, run_ahead=run_ahead)
    assert len(found.samples) == sum(request.params.n for request in requests)
    for sample in found.samples:
        outputs, reason, stop = uncrowded(sample.request, sample.index, LONGEST)
        assert (sample.outputs, sample.finish_reason, sample.stop_reason) == (outputs, reason, stop)
    counted, runner = found.scheduler.statistics, found.runner
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0
    assert runner.busy <= runner.now < requests[-1].arrival + runner.busy
    for request in requests:
        longest = max(len(uncrowded(request, index, LONGEST)[0]) for index in range(request.params.n))
        assert found.first[request.id] >= request.arrival + SECONDS_A_STEP
        assert found.last[request.id] - found.first[request.id] >= (longest - 1) * SECONDS_A_STEP - 1e-6


def test_after_an_interruption_new_sequences_take_the_slots_of_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, pages = SimulatedRunner(Device(4), linear), PageAllocator(20, 4)
    scheduler = Scheduler(SchedulerConfig(4, 32, 64), pages, PrefixTree(pages))
    ledger: Any = None
    loop = EngineLoop(scheduler, runner, True, ledger, clock=lambda: runner.now)

    def add(name: str) -> None:
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        for sequence in loop.add(Request(name, (3, 4, 5), params)):
            runner.device.asked[sequence.id] = (sequence.index, "")

    add("a")
    loop.step()
    with monkeypatch.context() as broken:
        broken.setattr(scheduler, "complete", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    assert loop.idle
    add("b")
    updates = [update for output in loop.outputs() for update in output.updates]
    assert len(updates) == 4
    assert updates[-1].finish_reason == "length"


def test_a_plan_encodes_whatever_kind_of_integers_its_parameters_are() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 32, 64), PageAllocator(20, 4), None)
    two: Any = np.int64(2)
    params = SamplingParams(
        logprobs=two, prompt_logprobs=two, min_tokens=two, stop_token_ids=[two], top_k=two, seed=two
    )
    scheduler.add(Request("a", (1, 2, 3), params))
    plan = scheduler.schedule()
    assert plan is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_the_hosts_half_runs_without_torch_and_llguidance() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['llguidance'] = None\n"
        f"for name in {HOST}: __import__('strata.' + name)\n"
        "from tests.engine.simulated import load, simulate\n"
        "print(sum(sample.finished for sample in simulate(load(20), pages=40, run_ahead=True).samples))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert int(done.stdout) == sum(request.params.n for request in load(20))
