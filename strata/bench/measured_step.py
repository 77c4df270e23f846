"""How long every operation of one step takes on the device that is here, and the step as a whole."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx

from strata.bench.graph_calls import TimedNodes, replaced
from strata.cache.groups import pools
from strata.cache.state_pool import StatePool
from strata.cache.tables import BufferShape
from strata.cost.step_model import dtype_name
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.plan import Chunk, Draw, NewSequence, StepPlan, WindowEntries
from strata.engine.program.meta_model import MetaModel
from strata.engine.program.program import StepProgram
from strata.engine.program.sizes import StepSizes
from strata.engine.program.source import Target
from strata.engine.runner import Runner
from strata.graph.walk import work_of
from strata.hardware.replay import time_replayed
from strata.hardware.roofline import Workload
from strata.kernels.device_limits import DeviceLimits, implementations_for
from strata.models import weights

_REPEATS = 7
# For so long a step is repeated on a CPU: of seven short ones each may meet another process.
_MIN_SECONDS = 0.5
# Calls of one kind that are timed in turn: what one has read is out of the cache when its turn comes again.
_MAX_CALLS = 8
# Of the engine's steps, unless this one is longer.
_STEP_TOKENS = 8192
# About what a call takes that is captured several times over.
_SHORT = 2e-5

Part = Literal["inputs", "model", "draw"]
Key = tuple[str, str]
"""A graph of a step program and a node of it, by their names."""


@dataclass(frozen=True)
class MeasuredNodes:
    """graph: the variant that computes the logits. seconds: of each node that works; on a GPU nodes that do the
    same have the time of all of them over their number. step: of the whole graph that computes the logits, as the
    engine runs it: on a GPU a replay where it is captured, inputs with it. how: in words."""

    graph: str
    seconds: Mapping[Key, float]
    step: float
    how: str

    def of(self, part: Part) -> dict[str, float]:
        """Seconds of the nodes that make inputs, compute the logits, or sample, by their names."""
        return {node: seconds for (name, node), seconds in self.seconds.items() if self._part(name) == part}

    def _part(self, name: str) -> Part | None:
        if name == self.graph:
            return "model"
        return "inputs" if name.endswith("_inputs") else "draw" if name.startswith("draw") else None


def engine_for(
    source: str,
    meta: MetaModel,
    device: str,
    quantization: str | None = None,
    sparsity: str | None = None,
    passes: str = EngineConfig.passes,
) -> EngineConfig:
    """What an engine of a model on the meta device would be asked for. source: a folder, whose weights are read if it
    has them; a shape, or a config.json. Raises ValueError for a file of another name."""
    path = Path(source)
    if path.is_file() and path.name != "config.json":
        raise ValueError(f"{source}: to be run, the config of a model has the name config.json; rename it")
    folder = path.parent if path.is_file() else path
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    return EngineConfig(
        str(folder) if path.exists() else source,
        quantization=quantization,
        sparsity=sparsity,
        passes=passes,
        dtype=dtype_name(meta.dtype),
        device=device,
        load_format="auto" if has_weights else "dummy",
    )


class _Ran(NamedTuple):
    """A node that works, with what it is called with."""

    node: fx.Node
    args: tuple[Any, ...]


def measure_step(asked: EngineConfig, workload: Workload, captured: BufferShape | None, graph: str) -> MeasuredNodes:
    """Run a step of a model, its weights random or its own, and time its nodes.

    asked: what the engine of the step would be asked for, of one rank; its lengths are those of the workload. captured:
    the size to which the step is padded on a GPU; None: it is launched eagerly. graph: the name of the variant that
    computes the logits. Keys and values of tokens from before are random. Raises ValueError for what an engine refuses,
    and for a model that the memory does not hold.
    """
    device = asked.resolve_device()
    config, _ = weights.resolve(asked.model, asked.load_format)
    longest = max(workload.total)
    if longest > config.longest:
        raise ValueError(f"a sequence of {longest:,} tokens is over the model's {config.longest:,}: it is not measured")
    kind = implementations_for(device)
    limits = DeviceLimits.of(device) if kind == "cuda" else None
    most = max(_STEP_TOKENS, workload.tokens, 0 if captured is None else captured.tokens)
    asked = replace(asked, max_num_batched_tokens=most, max_model_len=longest)
    asked = replace(asked, max_num_seqs=max(asked.max_sequences, len(workload.new)))
    sizes = EngineSizes.of(asked, config, device, limits)
    sizes.packing.check_kernels(kind, deterministic=False)
    store = weights.WeightStore.load(
        asked.model, sizes.packing.schemes, device, sizes.pool.dtype, asked.load_format, sizes.max_length
    )
    program = StepProgram.of(store.model, asked, Target(kind, limits, packed=store.quantized), sizes)
    each = -(-sizes.max_length // asked.page_size)
    counts = [each * len(workload.new) + 1] * len(sizes.groups)
    kept = pools(sizes.groups, counts, config.num_layers, device)
    for one in kept:
        for tensor in (*one.keys, *one.values):
            tensor.normal_()
    states = None if sizes.states is None else StatePool(sizes.states, asked.max_sequences + 1, device)
    runner = Runner(program, sizes, config, kept, device, config.vocab_size, states)
    plan = _plan(workload, each, config.vocab_size, sum(group.window is not None for group in sizes.groups))
    given: dict[str, tuple[Any, ...]] = {}  # to each graph, when it was called last

    def noted(name: str, graph: fx.GraphModule) -> Callable[..., Any]:
        run = graph.forward

        def call(*args: Any) -> Any:
            given[name] = args
            return run(*args)

        return call

    with torch.inference_mode(), replaced(program.graphs(), noted):
        steps = None
        if captured is not None:
            steps = runner.capture(
                StepSizes([replace(captured, groups=len(sizes.groups))], sizes.prompt_keys), all_of_them=True
            )
        runner.launch(plan)
        runner.settle()
        graphs = program.graphs()
        ran = {name: _nodes(graphs[name], arguments) for name, arguments in given.items()}
        timed = _on_gpu if device.type == "cuda" else _on_cpu
        seconds = {(name, node): taken for name in ran for node, taken in timed(graphs[name], ran[name], given[name])}
        if steps is None:
            whole = repeated(lambda: graphs[graph].forward(*given[graph]), device)
        else:
            (size,) = steps.sizes
            whole = repeated(lambda: steps.run(size), device)
    what = "its kernels in CUDA graphs, each alone" if device.type == "cuda" else "one operation after another"
    return MeasuredNodes(graph, seconds, whole, what)


def _plan(workload: Workload, each: int, vocabulary: int, windows: int) -> StepPlan:
    """A step in which every sequence is new and samples a row; each has so many pages of its own in every group."""
    new, chunks, entries = [], [], []
    for slot, (count, total) in enumerate(zip(workload.new, workload.total, strict=True)):
        tokens = tuple((7 * place + slot) % vocabulary for place in range(total))
        pages = tuple(range(slot * each, (slot + 1) * each))
        known = total - (count == 1 < total)  # what a decode runs only the device knows
        new.append(NewSequence(slot, slot, tokens[:known], known, slot))
        chunks.append(Chunk(slot, slot, total - count, count, (Draw(slot, slot),), 0, pages))
        entries += [WindowEntries(group, slot, 0, pages) for group in range(windows)]
    return StepPlan((), tuple(new), tuple(chunks), (), workload.tokens, windows=tuple(entries))


class _Noting(fx.Interpreter):
    """Keeps what the first nodes of each kind are called with; of the others only that they are of a kind."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.kinds: dict[tuple[Any, ...], list[_Ran]] = {}

    def run_node(self, n: fx.Node) -> Any:
        operation = work_of(n)
        if operation is not None:
            args, _ = self.fetch_args_kwargs_from_env(n)
            part = n.meta["module"].rpartition(".")[2]
            kind = self.kinds.setdefault((operation.name, part, *map(_described, args)), [])
            kind.append(_Ran(n, args if len(kind) < _MAX_CALLS else ()))
        return super().run_node(n)


def _described(value: Any) -> Any:
    """What decides which kernel takes an argument."""
    return (value.dtype, value.shape, value.stride()) if isinstance(value, Tensor) else type(value)


def _nodes(graph: fx.GraphModule, arguments: tuple[Any, ...]) -> list[list[_Ran]]:
    """The nodes that work, those that do the same together."""
    noting = _Noting(graph)
    noting.run(*arguments)
    return list(noting.kinds.values())


def _on_gpu(graph: fx.GraphModule, kinds: list[list[_Ran]], arguments: tuple[Any, ...]) -> Iterator[tuple[str, float]]:
    for kind in kinds:
        calls = [_call(one) for one in kind if one.args]
        taken = time_replayed(calls, repeats=_REPEATS, estimate=_SHORT).seconds
        yield from ((one.node.name, taken) for one in kind)


def _call(ran: _Ran) -> Callable[[], Any]:
    if ran.node.op == "call_method":
        return lambda: getattr(ran.args[0], str(ran.node.target))(*ran.args[1:])
    target: Any = ran.node.target
    return lambda: target(*ran.args)


def _on_cpu(graph: fx.GraphModule, kinds: list[list[_Ran]], arguments: tuple[Any, ...]) -> Iterator[tuple[str, float]]:
    """The best of runs of the whole graph, node by node, so that each finds in the cache what it does in a step."""
    best: dict[str, float] = {}

    def note(node: fx.Node, seconds: float) -> None:
        best[node.name] = min(seconds, best.get(node.name, seconds))

    for _ in _often_enough():
        TimedNodes(graph, time.perf_counter, note).run(*arguments)
    yield from ((one.node.name, best[one.node.name]) for kind in kinds for one in kind)


def _often_enough() -> Iterator[None]:
    """The repetitions on a CPU."""
    began, count = time.perf_counter(), 0
    while count < _REPEATS or time.perf_counter() - began < _MIN_SECONDS:
        yield
        count += 1


def repeated(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a run: the median on a GPU, by its own clock; the best on a CPU, which others may have for a while."""
    run()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in _often_enough():
            run()
            marks.append(time.perf_counter())
        return min(end - begin for begin, end in pairwise(marks))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    taken: list[float] = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    return statistics.median(taken)
