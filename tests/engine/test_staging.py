"""Steps whose inputs leave the host late, as on a GPU that is behind: no step computes on another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from strata import LLM, SamplingParams
from strata.cache.staging import Staging
from strata.cache.tables import StepBuffer

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
