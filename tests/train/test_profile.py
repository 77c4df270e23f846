"""Profiling of steps: real traces on the CPU, and the arithmetic on a trace of a GPU that was written by hand."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.train.predict.min_time import min_time
from strata.train.predict.step_kinds import ORDER, kind_of, read_step_trace
from strata.train.predict.step_shape import TrainShape
from strata.train.profile import NO_MEMORY, STEP, VIEW_MEMORY, StepProfiler, phase, write_snapshot

CPU = torch.device("cpu")


def train(profiler: StepProfiler, steps: int) -> None:
    """A step is three products of some milliseconds, and AdamW."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for number in range(1, steps + 1):
        with profiler.step(number):
            with phase("forward"):
                loss = model(torch.ones(2048, 512)).square().mean()
            with phase("backward"):
                loss.backward()
            with phase("update"):
                optimizer.step()
                optimizer.zero_grad()


def events(folder: Path) -> list[dict[str, Any]]:
    with gzip.open(folder / "trace.json.gz") as stream:
        return json.load(stream)["traceEvents"]  # type: ignore[no-any-return]


def test_chosen_steps_are_traced_with_their_phases(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "profile", range(2, 4), CPU, floors={"products": 1e-4})
    train(profiler, 5)
    names = [event["name"] for event in events(tmp_path / "profile") if event.get("cat") == "user_annotation"]
    assert [names.count(one) for one in (STEP, "strata.forward", "strata.backward", "strata.update")] == [2, 2, 2, 2]
    table = profiler.table
    assert table is not None
    assert table.steps == 2
    assert sum(table.seconds.values()) == pytest.approx(table.total)
    assert table.seconds["products"] > 0.3 * table.total
    assert table.seconds["optimizer"] > 0
    assert table.seconds["communication"] == table.seconds["attention"] == 0
    lines = table.text().splitlines()
    assert [line.split()[0] for line in lines] == ["a", *ORDER, "total"]
    assert " 0.10 " in lines[1]
    assert profiler.notes[-1] == NO_MEMORY
    assert "perfetto" in profiler.notes[0]


def test_a_run_that_ends_early_is_traced_as_far_as_it_came(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, range(2, 10), CPU)
    train(profiler, 3)
    assert profiler.table is None
    profiler.close()
    assert profiler.table is not None
    assert profiler.table.steps == 2


def test_other_ranks_and_steps_do_nothing(tmp_path: Path) -> None:
    other_rank = StepProfiler(tmp_path / "rank", range(1, 2), CPU, rank=1)
    other_steps = StepProfiler(tmp_path / "steps", range(9, 11), CPU)
    for profiler in (other_rank, other_steps):
        train(profiler, 2)
        profiler.close()
        assert profiler.table is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", [range(3, 3), range(1, 9, 2)])
def test_steps_with_gaps_are_refused(steps: range, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one after another"):
        StepProfiler(tmp_path, steps, CPU)


def span(category: str, name: str, start: float, duration: float, lane: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": lane}


def test_each_instant_on_a_gpu_counts_once_and_communication_only_where_it_shows() -> None:
    trace = [
        {"ph": "M", "name": "process_name", "pid": 0},
        span("user_annotation", STEP, 100, 40),
        span("cpu_op", "aten::mm", 100, 30),  # the host's time is not the device's
        span("kernel", "before the step", 50, 20, 7),
        span("kernel", "nvjet_tst_128x256", 110, 100, 7),
        span("kernel", "ncclDevKernel_AllReduce", 150, 100, 8),  # 60 behind the product, 10 behind the norm
        span("kernel", "rms_norm_kernel", 230, 10, 7),
        span("kernel", "ncclDevKernel_AllGather", 240, 20, 9),  # 10 with the other message
        span("kernel", "adamw_kernel", 280, 30, 7),
        span("gpu_memcpy", "Memcpy HtoD", 305, 15, 10),  # 5 behind the update
    ]
    table = read_step_trace(trace, STEP, {})
    wanted = {"products": 100, "norms": 10, "communication": 20 + 20, "optimizer": 30, "other": 10, "idle": 10 + 20}
    assert {kind: seconds * 1e6 for kind, seconds in table.seconds.items() if seconds} == pytest.approx(wanted)
    assert table.total == pytest.approx(220e-6)


def test_what_an_operator_calls_counts_as_the_outermost_kind() -> None:
    trace = [
        span("user_annotation", STEP, 0, 100),
        span("user_annotation", "strata.update", 50, 40),
        span("cpu_op", "aten::mm", 60, 10),
        span("cpu_op", "aten::linear", 10, 30),
        span("cpu_op", "aten::copy_", 15, 5),
        span("cpu_op", "aten::mul", 92, 4),
        span("cpu_op", "aten::mm", 0, 100, 3),  # another thread's
    ]
    table = read_step_trace(trace, STEP, {})
    wanted = {"products": 30, "optimizer": 40, "other": 4, "idle": 26}
    assert {kind: seconds * 1e6 for kind, seconds in table.seconds.items() if seconds} == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"holds no annotation named strata\.step"):
        read_step_trace(trace[1:], STEP, {})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("void multi_tensor_apply_kernel<LpNormFunctor<BFloat16>>", "optimizer"),
        ("softmax_gradient_kernel", "loss"),
        ("_LinearCrossEntropyBackward", "loss"),
        ("aten::normal_", "other"),
        ("silu_mul_kernel", "other"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "products"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_floors_have_the_names_of_the_table() -> None:
    time = min_time(TrainShape(config_from_dict(SHAPES["1B"], "1B"), 16384, 8192), "none", device("h200"))
    assert time.by_kind.keys() <= set(ORDER)
    assert sum(time.by_kind.values()) == pytest.approx(time.seconds)


def test_a_memory_snapshot_is_json_that_the_printed_command_draws(tmp_path: Path) -> None:
    frames = [{"name": "build", "filename": "model.py", "line": 3}]
    block = {"address": 4096, "size": 512, "requested_size": 500, "state": "active_allocated", "frames": frames}
    segment = {
        "device": 0,
        "address": 4096,
        "total_size": 2048,
        "allocated_size": 512,
        "active_size": 512,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 1),
        "frames": frames,
        "blocks": [block],
    }
    snapshot = {
        "segments": [segment],
        "device_traces": [[{"action": "alloc", "addr": 4096, "size": 512, "stream": 0, "frames": frames}]],
        "allocator_settings": {"expandable_segments": False},
    }
    target = tmp_path / "memory.json.gz"
    write_snapshot(snapshot, target)
    with gzip.open(target) as stream:
        assert json.load(stream) == snapshot | {"segments": [segment | {"segment_pool_id": [0, 1]}]}
    command = VIEW_MEMORY.format(target).replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert "Active Memory Timeline" in (tmp_path / "memory.html").read_text()
