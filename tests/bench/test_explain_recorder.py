"""What explains a run is measured on the built-in model: steps, tokens, operations, and what the host does beside."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from strata import LLM
from strata.bench.explain.measure import BenchWorkload, NodeTimes, ServedWorkload, measure, measured_steps
from strata.bench.explain.predicted_steps import predicted
from strata.bench.load.request_sets import EvenLengths
from strata.bench.run import Setup
from strata.bench.served.client import random_load
from strata.bench.workloads import InferenceTest, random_prompts
from strata.cost.step_model import StepModel
from strata.plan.explain.measurement import Measurement
from strata.plan.explain.split import split_steps
from strata.plan.explain.waterfalls import of_latency
from strata.plan.meta_model import meta_model
from tests.plan.explain.runs import DEVICE

TEST = InferenceTest("small", random_prompts(3, 20), (5, 3, 4), temperature=0.0)
OPTIONS = {"model": "builtin", "device": "cpu", "dtype": "float32", "max_num_seqs": 2, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OPTIONS, verbose=False)


def steps_of(llm: LLM, **options: str) -> StepModel:
    return StepModel(meta_model(llm.engine.config, None, torch.float32, **options), DEVICE)


@pytest.fixture(scope="module")
def measured(llm: LLM) -> Measurement:
    times = steps_of(llm)
    texts = tuple(llm.get_tokenizer().decode([id % 4096 for id in prompt]) for prompt in TEST.prompts)
    work = BenchWorkload(TEST, texts)
    return measure(llm, work, OPTIONS | {"dtype": "bfloat16"}, times, title="small", short=BenchWorkload(TEST).short())


def test_steps_hold_every_token_once(measured: Measurement) -> None:
    ran = Counter(chunk.sequence for step in measured.steps for chunk in step.chunks for _ in range(chunk.tokens))
    for request in measured.requests:
        assert ran[request.sequence] == len(request.prompt) + request.outputs - 1
        assert len(request.times) == request.outputs
    assert [request.outputs for request in measured.requests] == [5, 3, 4]
    assert max(len(step.chunks) for step in measured.steps) == 2


def test_steps_lie_inside_the_run_one_after_another(measured: Measurement) -> None:
    ends = [0.0]
    for step in measured.steps:
        assert ends[-1] <= step.begin < step.end <= measured.wall
        ends.append(step.end)
    assert 0 < measured.host["tokenization"] < measured.wall - measured.stepping


def test_operations_are_timed_by_the_kind_of_their_steps(measured: Measurement) -> None:
    assert {"prompt", "decode"} <= set(measured.traced)
    for traced in measured.traced.values():
        assert {"linear", "attention", "silu_mul"} <= set(traced.seconds)


def test_of_a_kind_of_steps_that_only_the_other_run_had_nothing_is_known(measured: Measurement) -> None:
    assert NodeTimes().traced(measured.steps) == {}


def test_ranks_that_share_a_processor_are_refused(llm: LLM) -> None:
    """Waits for each other would count as other work on the processors."""
    with pytest.raises(ValueError, match="several ranks on one processor"):
        predicted(llm, Setup("builtin", None, "float32", "cpu", False, tensor_parallel_size=2))


def test_the_engine_tells_what_it_is(measured: Measurement) -> None:
    facts = measured.facts
    assert (facts.dtype, facts.asked_dtype, facts.slots, facts.caches_prefixes) == ("float32", "bfloat16", 2, True)
    assert facts.operations == facts.expected


def test_graphs_and_tokenizer_are_as_before(llm: LLM, measured: Measurement) -> None:
    graphs = llm.engine.program
    assert "forward" not in vars(graphs.logits)
    assert llm.get_tokenizer().encode.__name__ == "encode"


def test_a_run_finds_nothing_of_the_one_before(llm: LLM) -> None:
    """The prefix cache is on, and the same prompts are computed whole again."""
    work = BenchWorkload(InferenceTest("again", random_prompts(1, 64), (2,), temperature=0.0))
    first, second = (measured_steps(llm, work) for _ in range(2))
    assert [step.tokens for step in first] == [step.tokens for step in second] == [64, 1]


def test_a_served_load_is_explained_from_arrival_to_last_token(llm: LLM) -> None:
    load = random_load(EvenLengths(12, 4), 5, 50.0, 0, 4096)
    times = steps_of(llm)
    measured = measure(llm, ServedWorkload(load), OPTIONS, times, title="served", short=ServedWorkload(load).short())
    assert [(len(one.prompt), one.outputs, len(one.times)) for one in measured.requests] == [(12, 4, 4)] * 5
    came = [one.due for one in measured.requests]
    assert [at - came[0] for at in came] == pytest.approx([at - load.due[0] for at in load.due])
    ran = Counter(chunk.sequence for step in measured.steps for chunk in step.chunks for _ in range(chunk.tokens))
    assert [ran[one.sequence] for one in measured.requests] == [12 + 4 - 1] * 5
    fall = of_latency(measured, times).waterfall
    assert fall.measured == pytest.approx(sum(one.times[-1] - one.due for one in measured.requests) / 5)
    assert fall.unexplained == pytest.approx(0.0, abs=1e-9)
    assert all(part.seconds > -1e-3 for part in fall.parts)


def test_plain_products_are_measured_where_packed_ones_are_unpacked(measured: Measurement) -> None:
    assert measured.unpacked is None
    options = OPTIONS | {"quantization": "int4"}
    packed = LLM(**options, verbose=False)
    times = steps_of(packed, quantization="int4")
    found = measure(packed, BenchWorkload(TEST), options, times, title="int4", short=BenchWorkload(TEST).short())
    assert found.unpacked is not None
    assert (found.unpacked.values, found.unpacked.asked) == ("int4", True)
    linear = next(one for one in split_steps(found, times).operations if one.name == "linear")
    assert 0 < found.unpacked.plain < linear.seconds
