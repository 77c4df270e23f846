"""Timing training steps over any layout: the model, the step and the test's figures, for `strata bench train`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.training.workload import PEAK_RATE, TrainingWork, learning_rate, synthetic_batch
from strata.bench.result import make_result, number
from strata.bench.trace import DeviceInterval, exposed_messages, kind_of
from strata.comm.collectives import all_gather_json
from strata.comm.launch import World, join_world
from strata.comm.mesh import Axis
from strata.hardware.machine import cpu_name
from strata.hardware.specs import recognize
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout, auto_layout, read_layout
from strata.plan.meta_model import find_config
from strata.train.optimizer.config import OptimizerConfig
from strata.train.steps.make import dummy, make_step
from strata.train.steps.parallel_step import ParallelStep

WARMUP_STEPS = 2  # the second records
SEED = 0
GIB = 2**30

MFU = "(6 * non-embedding parameters that a token uses + 6 * layers * heads * head_dim * sequence) * tokens/s / peak"
_MOST = 45


@dataclass(frozen=True)
class TrainingTest:
    """What is trained and how. batch: sequences of a pack. layout: for `read_layout`; None for `auto_layout`.

    peak_rate: the learning rate after its warm-up.
    """

    shape: str
    batch: int
    sequence: int
    precision: str = "bf16"
    recompute: str = "none"
    layout: str | None = None
    optimizer: str = "adamw"
    offload: bool = False
    records: bool = True
    peak_rate: float = PEAK_RATE

    def layout_of(self, config: ModelConfig, world: World) -> Layout:
        if self.layout is not None:
            return read_layout(self.layout)
        on_gpu = world.device.type == "cuda"
        memory = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else 16 * GIB
        return auto_layout(config, world.size, memory)[0]

    def name(self, layout: Layout) -> str:
        """That of the test in benchmarks/README.md."""
        eight_bits = "" if self.precision == "bf16" else "-fp8"
        known = {("1B", 1): "T6", ("8B", 8): f"T7{eight_bits}"}
        return known.get((self.shape, layout.ranks), "train")


def measure(
    test: TrainingTest, device: str, *, steps: int, repeat: int, losses: Path | None, kernels: bool
) -> tuple[dict[str, Any], str] | None:
    """The figures as a line of a results file holds them, and as text; None on all ranks but the first.

    losses: a file for the loss of every step, those of the warm-up first. kernels: trace one more step. Raises
    ValueError if there is no such device, or for what does not go together.
    """
    with join_world(device) as world:
        # Apart, so that nothing holds the ranks' groups when they part.
        values, text, every = _measured(test, world, steps=steps, repeat=repeat, kernels=kernels)
    if not world.is_main:
        return None
    if losses is not None:
        losses.write_text(json.dumps(every) + "\n", encoding="utf-8")
    return values, text


def _measured(
    test: TrainingTest, world: World, *, steps: int, repeat: int, kernels: bool
) -> tuple[dict[str, Any], str, list[float]]:
    """The figures, as `measure` has them, and the loss of every step. A collective call."""
    run = _TrainingRun(test, world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run.steps(WARMUP_STEPS)
    speeds = [steps * run.work.tokens / run.steps(steps) for _ in range(repeat)]
    memory = run.memory()
    trace: dict[str, Any] = {}
    if kernels and world.is_main:
        trace = traced(lambda: run.steps(1))
    elif kernels:
        run.steps(1)  # the first rank looks, and needs the others
    every = [loss.item() for loss in run.losses]
    values, text = _figures(run, speeds, memory)
    return values | {"loss_first": every[0], "loss_last": every[-1]} | trace, text, every


class _TrainingRun:
    """The steps of a test on this rank. work: that of a step, of all ranks, divided by their number."""

    def __init__(self, test: TrainingTest, world: World) -> None:
        config = find_config(test.shape)
        self.test, self.world, self.config = test, world, config
        self.layout = test.layout_of(config, world)
        self.layout.check(config, world.size)
        mesh = self.layout.mesh(world)
        self.world_axis: Axis = all_ranks(mesh)
        self.documents = mesh.flattened("dp", "shard")
        optimizer = OptimizerConfig(
            learning_rate=learning_rate(0, test.peak_rate), name=test.optimizer, offload=test.offload
        )
        self.step: ParallelStep = make_step(
            config,
            self.layout,
            mesh,
            optimizer,
            dummy(SEED, world.device),
            precision=test.precision,
            recompute=test.recompute,
            max_length=test.sequence,
            captures=test.records,
        )
        self.work = work_of(test, config, self.layout)
        self.losses: list[Tensor] = []

    def steps(self, count: int) -> float:
        """Seconds of so many steps."""
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            done, packs = len(self.losses), self.layout.micro_batches
            first = (done * self.documents.size + self.documents.index) * packs
            batches = [
                synthetic_batch(first + one, self.test.batch, self.test.sequence, self.config.vocab_size)
                for one in range(packs)
            ]
            self.losses.append(self.step(batches, learning_rate(done, self.test.peak_rate)).loss)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> dict[str, float]:
        """GiB on the fullest device, of tensors and as the allocator holds it; nothing on a CPU."""
        if self.world.device.type != "cuda":
            return {}
        own = [torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB]
        found = all_gather_json(own, self.world_axis, self.world.device)
        most = [round(max(column), 2) for column in zip(*found, strict=True)]
        return dict(zip(("memory_gib", "reserved_gib"), most, strict=True))


def work_of(test: TrainingTest, config: ModelConfig, layout: Layout) -> TrainingWork:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(config).parameters())
    used = parameters if config.tied else parameters - config.vocab_size * config.hidden_size
    if (experts := config.experts) is not None:
        idle = (experts.count - experts.per_token) * 3 * config.hidden_size * experts.intermediate_size
        used -= idle * sum(experts.layers)
    replicas = layout.dp * layout.shard
    tokens = replicas * layout.micro_batches * test.batch * test.sequence // layout.ranks
    updated = parameters // (layout.shard if layout.zero else 1)
    return TrainingWork(config, tokens, test.sequence, used, updated)


def _figures(run: _TrainingRun, speeds: list[float], memory: dict[str, float]) -> tuple[dict[str, Any], str]:
    test, work, layout = run.test, run.work, run.layout
    name = torch.cuda.get_device_name() if run.world.device.type == "cuda" else cpu_name()
    device = recognize(name) if run.world.device.type == "cuda" else None
    floor = None
    if device is not None and layout.divides_documents_only:
        floor = work.tokens / work.floor(device, test.precision)
    dtype = test.precision.partition("-")[0] if run.world.device.type == "cuda" else "float32"
    result = make_result(test.name(layout), test.shape, dtype, speeds, "tok/s", name, floor)
    values: dict[str, Any] = result.values() | asdict(test) | {"ranks": layout.ranks, "layout": asdict(layout)} | memory
    text = f"{result.text()}; {layout.ranks} ranks"
    if memory:
        text += f"; {memory['memory_gib']:.1f} GiB"
    if device is not None:
        peak = device.ceiling("compute", "bfloat16", measured=False).value
        values |= {"mfu": round(result.value * work.flops_per_token / peak, 4), "mfu_formula": MFU}
        text += f"; MFU {values['mfu']:.1%} = {MFU}, peak {number(peak / 1e12)} TFLOP/s"
    return values, text


def traced(run: Callable[[], object]) -> dict[str, Any]:
    """What `run` does on the device. kernels: milliseconds and number of launches of each, the longest first;
    exposed_ms: how long messages, and nothing else, were under way.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    work = []
    for event in profiled.profiler.kineto_results.events():
        if event.device_type().name != "CUDA":
            continue
        name = f"{kind_of(event.name())}: {event.name()[:90]}"
        seconds[name] += event.duration_ns()
        launches[name] += 1
        work.append(DeviceInterval(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    return {
        "exposed_ms": round(exposed_messages(work) / 1e6, 3),
        "kernels": {name: [round(time / 1e6, 3), launches[name]] for name, time in seconds.most_common(_MOST)},
    }
