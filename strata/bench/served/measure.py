"""Running a served load on an engine of this process, and what its time comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.bench.load.arrivals import load_seeds
from strata.bench.load.request_sets import EvenLengths
from strata.bench.result import short_dtype
from strata.bench.run import CostsOn, Setup, costs_on, device_name, engine
from strata.bench.served.client import ClientRequest, Load, ServedEngine, random_load
from strata.bench.served.report import ServedGaps
from strata.bench.served.step_logs import TracedSteps, step_log
from strata.bench.served.timeline import (
    ServedRequest,
    ServedStep,
    busy_seconds,
    latency_split,
    split_requests,
    split_wall,
    step_kinds,
)
from strata.bench.step_observers import observed
from strata.bench.trace import GapSplit, TraceTime
from strata.engine.scheduling.prompt_budget import SERVER_TPOT_MS

if TYPE_CHECKING:
    from strata.engine.build import Engine

LENGTHS = EvenLengths(prompt=512, output=128)
RATE, REQUESTS = "55", 500
# Requests at once before the first load, so that no load meets anything first.
WARM_UP_REQUESTS = 32


@dataclass(frozen=True)
class ServedTest:
    """rates: requests a second of each load. requests: of each load. seed: draws prompts and arrivals."""

    rates: Sequence[float]
    requests: int
    seed: int
    lengths: EvenLengths = LENGTHS


def served_gaps(setup: Setup, test: ServedTest) -> Iterator[ServedGaps]:
    """The gaps of each load, as it is done. Raises ValueError for a model that is too short for the load."""
    options = _server_options(setup)
    if test.lengths.max_tokens > options["max_model_len"]:
        raise ValueError(
            f"the requests of T5 have {test.lengths.max_tokens} tokens with their answers, and {setup.model} takes "
            f"{options['max_model_len']}: take a model of longer sequences"
        )
    llm = engine(options)
    served, vocabulary = ServedEngine(llm.engine, setup.model), llm.engine.config.vocab_size
    name = device_name(llm)
    costs = costs_on(setup, name)
    seeds = load_seeds(test.seed)
    first = min(WARM_UP_REQUESTS, test.requests)
    served.serve(random_load(test.lengths, first, float("inf"), next(seeds), vocabulary), "warm-up")
    for number, rate in enumerate(test.rates):
        load = random_load(test.lengths, test.requests, rate, next(seeds), vocabulary)
        measured = _measure(llm.engine, served, load, str(number), costs)
        yield ServedGaps(
            test=setup.test_name("T5"),
            model=setup.model,
            dtype=short_dtype(setup.dtype),
            data=test.lengths.words,
            request_rate=rate,
            requests=test.requests,
            seed=test.seed,
            device=name,
            **measured,
        )


def _server_options(setup: Setup) -> dict[str, Any]:
    """What `strata serve` starts its engine with, but no tokenizer, and sequences of MAX_MODEL_LEN at most."""
    return setup.llm_options() | {"enable_prefix_caching": True, "tpot_target_ms": SERVER_TPOT_MS}


def _measure(engine: Engine, served: ServedEngine, load: Load, name: str, costs: CostsOn | None) -> dict[str, Any]:
    """The load twice: timed, and then, on CUDA, until enough of its steps have been traced."""
    log = step_log(engine.device, engine.loop.clock)
    with observed(engine.loop, log):
        answered = served.serve(load, f"timed {name}")
    steps = log.steps()
    requests = numbered(answered, steps)
    traced = _traced(engine, served, load, f"traced {name}") if engine.device.type == "cuda" else None
    floors = None if costs is None else [costs.floor(step.workload, step.draws) for step in steps]
    # Where host and device are one, a step is busy from its beginning to its end.
    busy = [step.seconds for step in steps] if traced is None else busy_seconds(steps, traced[1])
    wall = split_wall(steps, requests)
    split = GapSplit(
        wall=wall.wall - wall.idle,
        floor=None if floors is None else sum(floors),
        busy=sum(busy),
        launch=wall.steps - sum(busy),
        host=wall.host,
        # Of each second that kernels run, as much as in the steps that were traced.
        exposed=0.0 if traced is None else sum(busy) * traced[0].exposed / traced[0].busy,
    )
    splits = split_requests(steps, requests)
    later = [one.tpot for one in splits if one.tpot is not None]
    return {
        "wall": wall.wall,
        "idle": wall.idle,
        "split": split,
        "host_gap": wall.host_gap,
        "steps": step_kinds(steps, floors, busy),
        "ttft": latency_split([one.ttft for one in splits]),
        "tpot": latency_split(later) if later else None,
        "trace": None if traced is None else traced[0],
    }


def _traced(
    engine: Engine, served: ServedEngine, load: Load, salt: str
) -> tuple[TraceTime, list[tuple[tuple[bool, int], float]]] | None:
    """Some steps of the load from the middle of its arrivals on: as many run at once as it brings."""
    traced = TracedSteps(engine.loop.clock, load.due[len(load.due) // 2] - load.due[0])
    try:
        with observed(engine.loop, traced):
            served.serve(load, salt, until=traced.poll)
    finally:
        traced.stop()
    return traced.result()


def numbered(answered: Sequence[ClientRequest], steps: Sequence[ServedStep]) -> list[ServedRequest]:
    """The requests of a load with the ids of their sequences, which ascend in the order of arrival.

    Raises RuntimeError if the steps hold other sequences as well, or not all.
    """
    ids = sorted({chunk.sequence for step in steps for chunk in step.chunks})
    if len(ids) != len(answered):
        raise RuntimeError(f"{len(answered)} requests were served, and the steps held {len(ids)} sequences")
    return [ServedRequest(id, one.due, one.times) for id, one in zip(ids, answered, strict=True)]
