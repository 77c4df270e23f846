"""Runs a workload once and measures what explains it."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile

from strata.bench.explain.plain_products import product_here, unpacked_products
from strata.bench.explain.recorder import HostSpans, StepRecorder
from strata.bench.graph_calls import TimedNodes, replaced
from strata.bench.run import device_name
from strata.bench.served.client import Load, ServedEngine
from strata.bench.step_observers import StepMarks, observed, profiled_work
from strata.bench.trace import OTHER, kind_of, read_trace
from strata.bench.workloads import InferenceTest
from strata.cost.nodes import NodeCost
from strata.cost.step_model import StepModel, dtype_name
from strata.engine.program.meta_model import MetaModel
from strata.graph.trace import operation_of
from strata.graph.walk import operation_counts
from strata.hardware.nvml import open_nvml
from strata.hardware.telemetry import Summary, TelemetrySampler
from strata.kernels.torch_functions import TORCH_FUNCTIONS
from strata.plan.explain.explanation import StepWork
from strata.plan.explain.measurement import (
    DeviceState,
    EngineFacts,
    MeasuredRequest,
    MeasuredStep,
    Measurement,
    StepChunk,
    TracedOperations,
)

if TYPE_CHECKING:
    from strata.engine.llm import LLM
    from strata.engine.plan import StepPlan
    from strata.engine.program.program import StepProgram

# Of a workload's short form: so many tokens of each output, and requests.
_SHORT_OUTPUT, _SHORT_REQUESTS = 12, 64
# Memory of a GPU in use beside this process's tensors: a context takes 0.5 GiB and the graphs of an engine 0.4 (0.6B on
# an H200); what is more than this, others have.
_OTHERS_BYTES = 2 << 30
_READING = 0.1  # seconds between two readings of a GPU


@dataclass(frozen=True)
class BenchWorkload:
    """test: prompts as ids and lengths. texts: the prompts as text, where they are to become ids in the run."""

    test: InferenceTest
    texts: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.test.name

    def short(self) -> BenchWorkload:
        """Its first requests with short outputs."""
        count = min(_SHORT_REQUESTS, len(self.test.prompts))
        outputs = tuple(min(_SHORT_OUTPUT, one) for one in self.test.outputs[:count])
        test = replace(self.test, prompts=self.test.prompts[:count], outputs=outputs)
        return BenchWorkload(test, None if self.texts is None else self.texts[:count])


@dataclass(frozen=True)
class ServedWorkload:
    """load: requests and when they come, by the messages of an engine process (see `ServedEngine`)."""

    load: Load
    name: str = "T5"
    test: None = None

    def short(self) -> ServedWorkload:
        """Its first requests with short outputs, all at once."""
        asks = [replace(one, output_tokens=min(_SHORT_OUTPUT, one.output_tokens)) for one in self.load.asks]
        return ServedWorkload(Load(asks[:_SHORT_REQUESTS], [0.0] * len(asks[:_SHORT_REQUESTS])))


AnyWorkload = BenchWorkload | ServedWorkload


@dataclass(frozen=True)
class _MeasuredRun:
    wall: float
    processor: float
    start: float
    requests: tuple[MeasuredRequest, ...]


def measure(
    llm: LLM,
    workload: AnyWorkload,
    options: Mapping[str, Any],
    times: StepModel,
    *,
    title: str,
    ideal: float | None = None,
    short: AnyWorkload | None = None,
) -> Measurement:
    """options: that the engine was asked for. times: predicts its steps. ideal: see `Measurement`. short: what is run
    once more, before, to time operations: on a CPU node by node, on a GPU under the profiler, by kinds of kernels
    (`kernel_kind`); None: nothing is.
    """
    engine = llm.engine
    on_host = engine.device.type == "cpu"
    traced: Mapping[StepWork, TracedOperations] = {}
    if short is not None:
        traced = _traced(llm, short) if on_host else _profiled(llm, short)
    recorder, spans = StepRecorder(engine), HostSpans(engine.loop.clock)
    scheduler = engine.loop.scheduler
    before = scheduler.statistics.preemptions
    nvml = None if on_host else open_nvml()
    gpu = None
    if nvml is not None:
        gpu = nvml.device(f"GPU-{torch.cuda.get_device_properties(engine.device).uuid}")
    sampler = TelemetrySampler(gpu, _READING)
    with ExitStack() as beside:
        if not on_host:
            beside.enter_context(sampler)
        beside.enter_context(spans.tokenization(engine.tokenizer))
        beside.enter_context(observed(engine.loop, recorder))
        ran = _run(llm, workload)
    others = 0 if on_host else _beside_tensors(engine.device)
    state = DeviceState(
        Summary.of(sampler.readings).slowed_by,
        (f"{others / 2**30:.1f} GiB in use beside this process's tensors",) if others > _OTHERS_BYTES else (),
    )
    steps = recorder.steps(ran.start)
    unpacked = None
    if on_host and short is not None:
        product = product_here(times.model.dtype, deterministic=bool(options.get("deterministic")))
        unpacked = unpacked_products(steps, times, product, asked=options.get("quantization") is not None)
    return Measurement(
        title,
        device_name(llm),
        ran.wall,
        steps,
        _numbered(ran.requests, steps),
        facts(llm, options, times),
        spans.seconds,
        scheduler.statistics.preemptions - before,
        ideal,
        traced,
        state,
        ran.processor if on_host else None,
        unpacked,
    )


def _beside_tensors(device: torch.device) -> int:
    """Bytes of a GPU that are in use, but for those that this process's tensors take, of all its engines."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def measured_steps(llm: LLM, workload: AnyWorkload) -> tuple[MeasuredStep, ...]:
    """The steps of one run."""
    recorder = StepRecorder(llm.engine)
    with observed(llm.engine.loop, recorder):
        ran = _run(llm, workload)
    return recorder.steps(ran.start)


class NodeTimes:
    """An observer that knows how long the operations of each kind of step took on a CPU, where graphs run node by node:
    without what lies between them, which takes longer so."""

    def __init__(self) -> None:
        self._seconds: dict[StepWork, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._kind: StepWork = "decode"

    def begin(self, plan: StepPlan) -> None:
        chunks = tuple(StepChunk(one.sequence, one.start, one.count, len(one.draws)) for one in plan.chunks)
        self._kind = MeasuredStep(0.0, 0.0, chunks).kind

    def end(self) -> None:
        pass

    def note(self, node: fx.Node, seconds: float) -> None:
        """What looks at memory alone is none of a step's operations."""
        operation = operation_of(node) or TORCH_FUNCTIONS.get(node.target)
        if operation is not None:
            self._seconds[self._kind][operation.name] += seconds

    def traced(self, steps: Iterable[MeasuredStep]) -> dict[StepWork, TracedOperations]:
        """steps: the same work without clocks around nodes. A served load may have kinds of steps in one of its runs
        that it lacks in another: of these nothing is known."""
        whole: dict[StepWork, float] = defaultdict(float)
        for step in steps:
            whole[step.kind] += step.seconds if step.processor is None else step.processor
        return {kind: TracedOperations(dict(self._seconds[kind]), whole[kind]) for kind in whole if self._seconds[kind]}

    def of(self, program: StepProgram) -> AbstractContextManager[None]:
        """Inside, the graphs of steps tell this how long their nodes take."""
        return replaced(program.graphs(), lambda _, graph: TimedNodes(graph, time.thread_time, self.note).run)


def _traced(llm: LLM, short: AnyWorkload) -> Mapping[StepWork, TracedOperations]:
    nodes = NodeTimes()
    with nodes.of(llm.engine.program), observed(llm.engine.loop, nodes):
        _run(llm, short)
    return nodes.traced(measured_steps(llm, short))


def _profiled(llm: LLM, short: AnyWorkload) -> Mapping[StepWork, TracedOperations]:
    """Kernels of all kinds of steps together."""
    marks = StepMarks()
    with observed(llm.engine.loop, marks), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        _run(llm, short)
    found = read_trace(*profiled_work(profiled, marks.count))
    seconds = {name: kind.seconds for name, kind in found.kinds.items()}
    return dict.fromkeys(get_args(StepWork), TracedOperations(seconds, found.span - found.host))


def kernel_kind(node: NodeCost) -> str:
    """What the kernels of a node do, as traces name it."""
    kinds = (kind_of(name) for name in (node.operation, *node.kernels))
    return next((kind for kind in kinds if kind != OTHER), OTHER)


def facts(llm: LLM, options: Mapping[str, Any], times: StepModel) -> EngineFacts:
    """How an engine is set up. options: that it was asked for."""
    engine = llm.engine
    config, ledger = engine.loop.scheduler.config, engine.ledger
    planned = times.model
    assert isinstance(planned, MetaModel)
    dtype = dtype_name(next(engine.model.parameters()).dtype)
    asked = str(options.get("dtype", "auto"))
    return EngineFacts(
        str(options["model"]),
        dtype,
        dtype if asked == "auto" else asked,
        config.max_sequences,
        config.max_tokens,
        config.max_length,
        ledger.tokens,
        ledger.page_size,
        bool(options.get("enable_prefix_caching", True)),
        math.prod(int(options.get(name, 1)) for name in ("tensor_parallel_size", "pipeline_parallel_size")),
        operation_counts(engine.program.logits),
        operation_counts(planned.program.logits),
    )


def _run(llm: LLM, workload: AnyWorkload) -> _MeasuredRun:
    """One `generate`, which finds nothing cached. Every request gets as many tokens as it was asked for."""
    llm.engine.loop.scheduler.reset()
    if isinstance(workload, ServedWorkload):
        return _serve(llm, workload.load)
    from strata import SamplingParams

    test, vocabulary, clock = workload.test, llm.engine.config.vocab_size, llm.engine.loop.clock
    params = [
        SamplingParams(temperature=test.temperature, max_tokens=length, ignore_eos=True) for length in test.outputs
    ]
    prompts: Sequence[Any] = [{"prompt_token_ids": [token % vocabulary for token in prompt]} for prompt in test.prompts]
    start, began = clock(), time.thread_time()
    outputs = llm.generate(prompts if workload.texts is None else list(workload.texts), params, use_tqdm=False)
    wall, ran = clock() - start, time.thread_time() - began
    requests = tuple(MeasuredRequest(tuple(one.prompt_token_ids), len(one.outputs[0].token_ids)) for one in outputs)
    return _MeasuredRun(wall, ran, start, requests)


def _serve(llm: LLM, load: Load) -> _MeasuredRun:
    clock = llm.engine.loop.clock
    served = ServedEngine(llm.engine, "explained")
    start, began = clock(), time.thread_time()
    answered = served.serve(load, str(start))  # whose prefixes no other run shares
    wall, ran = clock() - start, time.thread_time() - began
    requests = tuple(
        MeasuredRequest(
            tuple(token for token in ask.prompt if isinstance(token, int)),
            len(one.times),
            one.due - start,
            tuple(at - start for at in one.times),
        )
        for ask, one in zip(load.asks, answered, strict=True)
    )
    return _MeasuredRun(wall, ran, start, requests)


def _numbered(requests: Sequence[MeasuredRequest], steps: Sequence[MeasuredStep]) -> tuple[MeasuredRequest, ...]:
    """With the ids of their sequences, which ascend in the order of arrival, and, where nobody noted when tokens were
    delivered, the ends of the steps that drew them."""
    drawn: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        for chunk in step.chunks:
            drawn[chunk.sequence] += [step.end] * chunk.draws
    return tuple(
        replace(request, sequence=id, times=request.times or tuple(drawn[id]))
        for request, id in zip(requests, sorted(drawn), strict=True)
    )
