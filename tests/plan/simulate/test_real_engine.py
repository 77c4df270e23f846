"""The simulation beside the real engine: the built-in model on a CPU, the same requests, the steps' measured times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from strata import LLM
from strata.cache.groups import PageGroup
from strata.cache.pages import NONE_SHARED, SharedKeys
from strata.cache.pool import PoolShape
from strata.engine.engine_config import EngineConfig, groups_of
from strata.engine.loop import EngineLoop
from strata.engine.plan import StepPlan
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.scheduler import Statistics
from strata.plan.simulate.host import NO_HOST
from strata.plan.simulate.prices import Line
from strata.plan.simulate.replica import EngineShape, Replica, ReplicaJob
from strata.plan.simulate.request import Intervals
from tests.models.checkpoints import FAMILY_CONFIGS, make_checkpoint
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS

# All layers with one window; and one with a window behind one without. Fixed states beside pages of all tokens.
WINDOWS = ("mistral-window", "qwen3-biases-window")
STATES = ("granite-hybrid",)
PAGES, PAGE_SIZE = 40, 4
OPTIONS: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "page_size": PAGE_SIZE, "num_pages": PAGES}


@dataclass
class Played:
    """What the real engine did. ids: of each sequence, prompt and outputs. ends: when each got its last."""

    loop: EngineLoop
    groups: tuple[PageGroup, ...]
    group_pages: tuple[int, ...]
    snapshots: int | None = None
    requests: list[Request] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ids: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)


def some_requests(eos: frozenset[int], ids: range, step: float) -> list[Request]:
    """Prompts that begin alike, several samples, priorities, answers that end by themselves; bursts and pauses of a few
    steps of so many seconds."""
    source = random.Random(3)
    common = [source.choices(ids, k=24) for _ in range(3)]
    arrival, found = 0.0, []
    for number in range(45):
        pause = source.choice([0.0, 0.0, 3.0, 30.0]) * step * source.random()
        # The first come at once, so that pages run out however long steps take.
        arrival += pause if number >= 15 else 0.0
        prompt = source.choice(common)[: source.choice([0, 9, 24])] + source.choices(ids, k=source.randint(1, 20))
        # One is longer than a step, so that a prompt is divided whatever runs beside it.
        prompt += source.choices(ids, k=OPTIONS["max_num_batched_tokens"]) if number == 0 else []
        params = SamplingParams(
            n=source.choice([1, 1, 1, 3]),
            temperature=0.9,
            max_tokens=source.choice([1, 4, 20, 40]),
            ignore_eos=source.random() < 0.5,
            detokenize=False,
        )
        found.append(Request(str(number), tuple(prompt), params, source.choice([0, 0, 5]), arrival, "", eos))
    return found


@pytest.fixture(scope="module", params=["builtin", *WINDOWS, *STATES])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A clock that measured steps move on; while nothing runs, it moves to the next request."""
    model = request.param
    if model in WINDOWS:
        config = dict(FAMILY_CONFIGS)[model] | {"sliding_window": 11, "max_position_embeddings": 128}
        model = str(make_checkpoint(tmp_path_factory.mktemp("windows") / model, config))
    elif model in STATES:
        config = RECURRENT_CONFIGS[model] | {"max_position_embeddings": 128}
        model = str(make_checkpoint(tmp_path_factory.mktemp("states") / model, config))
    more = {} if model == "builtin" else {"dtype": "float32", "skip_tokenizer_init": True}
    llm = LLM(model, device="cpu", verbose=False, seed=5, **OPTIONS, **more)
    loop = llm.engine.loop
    engine, length = llm.engine, loop.scheduler.config.max_length
    heads, width = engine.config.num_kv_heads, engine.config.head_dim
    pool = PoolShape(engine.config.num_layers, PAGE_SIZE, heads, width, torch.float32)
    groups = groups_of(EngineConfig(model), engine.config, pool, length) if model != "builtin" else ()
    snapshots = engine.ledger.snapshots if engine.ledger.state_bytes else None
    played = Played(loop, groups, engine.ledger.group_pages if groups else (), snapshots)
    runner: Any = loop._runner
    launch = runner.launch

    def noted(plan: StepPlan) -> Any:
        played.plans.append(plan)
        return launch(plan)

    runner.launch = noted
    loop.add(Request("warm", (1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True)))
    began = time.perf_counter()
    for _ in loop.outputs():
        pass
    step = (time.perf_counter() - began) / 8
    loop.scheduler.reset()
    loop.scheduler._next_id, loop.scheduler.statistics = 0, Statistics()
    played.plans.clear()
    ids = range(1, min(300, engine.config.vocab_size))
    # Of random weights one id in 24 ends an answer: what is drawn then holds some, with any seed.
    eos = engine.eos_ids if model == "builtin" else frozenset(range(2, engine.config.vocab_size, 24))
    played.requests = some_requests(eos, ids, step)
    coming, now = list(played.requests), 0.0
    while coming or not loop.idle:
        if loop.idle:
            now = max(now, coming[0].arrival)
        while coming and coming[0].arrival <= now:
            for sequence in loop.add(coming.pop(0)):
                played.ids[sequence.id] = sequence.tokens
        began = time.perf_counter()
        output = loop.step()
        played.seconds.append(time.perf_counter() - began)
        now += played.seconds[-1]
        for update in output.updates if output is not None else ():
            played.ends[update.sequence.request.id] = now
            played.reasons[update.sequence.request.id] = str(update.finish_reason)
    return played


class Measured:
    """Steps take what is told by their number; all plans are kept."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.plans: list[StepPlan] = []
        self._seconds = seconds

    def price(self, plan: StepPlan) -> tuple[float, None]:
        self.plans.append(plan)
        return self._seconds(len(self.plans) - 1), None

    def decodes(self, sequences: int, keys: int, shared: SharedKeys = NONE_SHARED) -> Line:
        raise AssertionError("every step is asked for")


def simulate(real: Played, seconds: Callable[[int], float]) -> tuple[Replica, list[StepPlan], dict[str, float]]:
    """The same requests on a simulated engine, whose steps take so long by their number; its plans, and when each
    request got its last id."""
    shape = EngineShape(
        real.loop.scheduler.config,
        PAGES,
        PAGE_SIZE,
        caches=True,
        run_ahead=False,
        is_late=False,
        groups=real.groups,
        group_pages=real.group_pages,
        snapshots=real.snapshots,
    )
    prices, ends = Measured(seconds), {}

    def told(job: ReplicaJob, heard: float, is_last: bool) -> None:
        if is_last:
            ends[job.request.id] = heard

    replica = Replica(shape, prices, NO_HOST, Intervals(), told)
    for request in real.requests:
        while replica.wake < request.arrival:
            replica.proceed()
        for sequence in replica.receive(request.arrival, ReplicaJob(int(request.id), request)):
            replica.runner.drawn[sequence.id] = real.ids[sequence.id]
    while not replica.loop.idle:
        replica.proceed()
    return replica, prices.plans, ends


def test_every_decision_is_the_real_engines(real: Played) -> None:
    replica, plans, ends = simulate(real, lambda number: real.seconds[number])
    assert len(real.plans) > 100
    has_windows = any(group.window is not None for group in real.groups)
    assert has_windows == any(plan.windows for plan in real.plans)
    assert bool(real.snapshots) == any(plan.states_before and plan.states_after for plan in real.plans)
    for number, (ours, theirs) in enumerate(zip(plans, real.plans, strict=True)):
        assert ours == theirs, f"step {number}"
    assert ends == pytest.approx(real.ends, abs=1e-9)
    counted = real.loop.scheduler.statistics
    assert replica.scheduler.statistics == counted
    # What could differ was there.
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0
    assert {"stop", "length"} <= set(real.reasons.values())
    assert any(not chunk.draws for plan in real.plans for chunk in plan.chunks), "no prompt was divided"


def test_other_times_of_steps_lead_to_other_decisions(real: Played) -> None:
    """The plans do not follow from the requests alone."""
    quick, slow = (simulate(real, lambda number, seconds=seconds: seconds)[1] for seconds in (1e-9, 1e3))
    assert quick != slow
