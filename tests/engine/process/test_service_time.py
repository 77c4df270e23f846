"""What a service adds to a step on the host."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from strata.engine.loop import StepOutput, StepTiming
from strata.engine.plan import NOTHING
from strata.engine.process.messages import (
    Add,
    FromEngine,
    Hello,
    Step,
)
from strata.engine.process.service import Service
from strata.engine.recorded_steps import REASONS
from strata.engine.request import Request, Sequence, Status, Update
from strata.engine.watch.step_shares import StepShares
from strata.kernels.compiled import KINDS
from tests.engine.process.desk import GREEDY, A


def test_the_host_time_of_a_step_is_small() -> None:
    """256 sequences that get a token each: what the service adds to a step must hide beside the device's work."""
    request = Request("0", (1,), GREEDY)
    sequences = [Sequence(i, replace(request, id=f"{i}"), 0, 100, [1], 1) for i in range(256)]
    for sequence in sequences:
        sequence.status = Status.RUNNING
    timing = StepTiming(NOTHING, (), 1e12, 0.0, 0.0)
    output = StepOutput([Update(sequence, [77], None) for sequence in sequences], {}, None, [], timing)
    scheduler = SimpleNamespace(
        running=256,
        waiting=0,
        waiting_tokens=0,
        statistics=SimpleNamespace(prefix_queries=0, prefix_hits=0, preemptions=0),
        max_sequences=256,
    )
    waiting = iter(sequences)
    loop = SimpleNamespace(
        idle=False,
        clock=time.monotonic,
        scheduler=scheduler,
        launch_late=lambda behind: None,
        step=lambda: output,
        add=lambda *_: [next(waiting)],
    )
    sizes = SimpleNamespace(vocab_size=4096, hidden_size=8)
    engine = SimpleNamespace(
        loop=loop,
        pages=SimpleNamespace(usage=0.5, num_pages=10, page_size=16),
        pooler=None,
        tokenizer=None,
        config=sizes,
        max_model_len=100,
        eos_ids=frozenset[int](),
        bad_words=(),
        default_params=GREEDY,
        ledger=SimpleNamespace(device="cpu"),
        startup={},
        compilations=SimpleNamespace(counts=dict.fromkeys(KINDS, 0)),
        recorded=SimpleNamespace(sizes=[], unrecorded=dict.fromkeys(REASONS, 0)),
        ranks=None,
        shares=StepShares(),
    )
    frames: list[bytes] = []
    service = Service(cast(Any, engine), "stub", lambda _, frame: not frames.append(frame), print)
    service.receive(A, msgspec.msgpack.encode(Hello()))
    for i in range(256):
        service.receive(A, msgspec.msgpack.encode(Add(f"chatcmpl-{i:032}", [1], GREEDY)))
    service.step()
    gc.collect()
    times = []
    for _ in range(200):
        began = time.thread_time()
        service.step()
        service.report()
        times.append(time.thread_time() - began)
    step = msgspec.msgpack.decode(frames[-1], type=FromEngine)
    assert isinstance(step, Step)
    assert len(step.deltas) == 256
    assert min(times) < 1e-3, f"{1e6 * min(times):.0f} us"
