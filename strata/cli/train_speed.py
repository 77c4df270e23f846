"""Timing training steps on one GPU: the model, the step and the test's figures; T6 is `strata bench train`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from strata.cli.bench_result import make_result, number
from strata.cli.costing import find_config
from strata.cli.trace import kind_of
from strata.cli.train_workload import TrainingWork, learning_rate, synthetic_batch
from strata.hardware.specs import recognize
from strata.models.families import build
from strata.models.initialize import randomize
from strata.train.config import OptimizerConfig
from strata.train.fused_adamw import FusedAdamW
from strata.train.graph_step import GraphStep

WARMUP_STEPS = 2  # the second records
SEED = 0
GIB = 2**30

MFU = "(6 * non-embedding parameters + 6 * layers * heads * head_dim * sequence) * tokens/s / peak"


def measure(
    shape: str,
    batch: int,
    sequence: int,
    precision: str,
    *,
    steps: int,
    repeat: int,
    losses: Path | None,
    kernels: bool,
) -> tuple[dict[str, Any], str]:
    """The figures of T6 as a line of a results file holds them, and as text. Raises ValueError without a GPU.

    losses: a file for the loss of every step, those of the warm-up first. kernels: trace one more step.
    """
    if not torch.cuda.is_available():
        raise ValueError("strata bench train measures a GPU, and this machine has no CUDA device")
    step, work = prepared(shape, batch, sequence, precision)
    every: list[Tensor] = []

    def run(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            done = len(every)
            packed = synthetic_batch(done, batch, sequence, work.config.vocab_size)
            every.append(step([packed], learning_rate(done))[0])
        torch.cuda.synchronize()
        return time.perf_counter() - start

    torch.cuda.reset_peak_memory_stats()
    run(WARMUP_STEPS)
    speeds = [steps * work.tokens / run(steps) for _ in range(repeat)]
    name = torch.cuda.get_device_name()
    device = recognize(name)
    floor = None if device is None else work.tokens / work.floor(device, precision)
    result = make_result(
        "T6" if shape == "1B" else "train", shape, precision.partition("-")[0], speeds, "tok/s", name, floor
    )
    memory = torch.cuda.max_memory_allocated() / GIB
    values: dict[str, Any] = asdict(result) | {"batch": batch, "sequence": sequence, "precision": precision}
    values |= {"memory_gib": round(memory, 2), "reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2)}
    values |= {"loss_first": every[0].item(), "loss_last": every[-1].item()}
    text = f"{result.text()}; {memory:.1f} GiB"
    if device is not None:
        peak = device.ceiling("compute", "bfloat16", measured=False).value
        values |= {"mfu": round(result.value * work.flops_per_token / peak, 4), "mfu_formula": MFU}
        text += f"; MFU {values['mfu']:.1%} = {MFU}, peak {number(peak / 1e12)} TFLOP/s"
    if losses is not None:
        losses.write_text(json.dumps([loss.item() for loss in every]) + "\n", encoding="utf-8")
    if kernels:
        values["kernels"] = traced(lambda: run(1))
    return values, text


def prepared(shape: str, batch: int, sequence: int, precision: str) -> tuple[GraphStep, TrainingWork]:
    """A model with random weights on the GPU and the step that trains it."""
    config = find_config(shape)
    with torch.device("cuda"):
        model = build(config, sequence)
    randomize(model, SEED)
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    model = model.to(torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    embedding = 0 if config.tied else config.vocab_size * config.hidden_size
    work = TrainingWork(config, batch * sequence, sequence, parameters - embedding, parameters)
    optimizer = FusedAdamW(model, OptimizerConfig(learning_rate=learning_rate(0)), masters)
    return GraphStep(model, optimizer, precision), work


def traced(run: Callable[[], object]) -> dict[str, list[float]]:
    """Milliseconds on the device and number of launches of each kernel in `run`, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiled.profiler.kineto_results.events():
        if event.device_type().name == "CUDA":
            name = f"{kind_of(event.name())}: {event.name()[:90]}"
            seconds[name] += event.duration_ns()
            launches[name] += 1
    return {name: [round(time / 1e6, 3), launches[name]] for name, time in seconds.most_common(45)}
