"""The log of a run: what a resumed run drops, TensorBoard's files as its own reader sees them, Weights & Biases through
a stand-in for the package, what is missing, full disks, the picture; and the profile of its steps."""

from __future__ import annotations

import gzip
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from strata.hardware.specs import device
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.train.log.config import LogConfig
from strata.train.log.json_lines import JsonLines, read_lines
from strata.train.log.logs import Logs, open_logs
from strata.train.log.picture import plot_report
from strata.train.predict.min_time import min_time
from strata.train.predict.step_kinds import ORDER, kind_of, read_step_trace
from strata.train.predict.step_shape import TrainShape
from strata.train.profile import NO_MEMORY, STEP, VIEW_MEMORY, StepProfiler, write_snapshot


def values(step: int) -> dict[str, Any]:
    return {
        "loss": 5.0 / step,
        "gradient_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_per_second": 100 * step,
        "mfu": 0.4,
    }


def test_a_resumed_run_drops_the_lines_after_its_step(tmp_path: Path) -> None:
    with open_logs(tmp_path / "run", LogConfig(), 0, {}) as logs:
        for step in (1, 2, 3):
            logs.write(step, values(step))
    with (tmp_path / "run/log.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')  # a crash
    with open_logs(tmp_path / "run", LogConfig(), 2, {}) as logs:
        logs.write(3, {"loss": math.nan, "gradient_norm": math.inf, "note": "skipped"})
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert lines[:2] == [{"step": step} | values(step) for step in (1, 2)]
    assert lines[2:] == [{"step": 3, "loss": None, "gradient_norm": None, "note": "skipped"}]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with open_logs(tmp_path / "run", LogConfig(tensorboard=True), 0, {}, rank=1) as logs:
        logs.write(1, values(1))
    assert not (tmp_path / "run").exists()


def test_a_sink_that_fails_is_told_of_once_and_the_others_go_on(tmp_path: Path) -> None:
    class Full:
        def write(self, step: int, values: Any) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    told: list[str] = []
    with Logs([Full(), JsonLines(tmp_path / "log.jsonl", 0)], told.append) as logs:
        logs.write(1, values(1))
        logs.write(2, values(2))
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == [1, 2]
    assert len(told) == 1
    assert "the log is incomplete, training goes on: Full: [Errno 28] No space left" in told[0]


def test_a_line_that_does_not_fit_leaves_no_half(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl", 0)
    log.write(1, values(1))
    whole = (tmp_path / "log.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            log.write(2, values(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "log.jsonl").read_bytes() == whole
    log.write(3, values(3))
    assert [line["step"] for line in read_lines(tmp_path / "log.jsonl")] == [1, 3]


def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LogConfig(tensorboard=True)
    with open_logs(tmp_path, config, 0, {}) as logs:
        for step in (1, 2, 3, 4):
            logs.write(step, values(step) | {"note": "text is left out"})
    with open_logs(tmp_path, config, 2, {}) as logs:
        for step in (3, 4, 5):
            logs.write(step, {"loss": -float(step)})
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert sorted(found.Tags()["scalars"]) == sorted(values(1))
    assert [(one.step, one.value) for one in found.Scalars("loss")] == [(1, 5), (2, 2.5), (3, -3), (4, -4), (5, -5)]
    assert not any(path.suffix in (".pt", ".pkl") for path in tmp_path.rglob("*"))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What a stand-in for the package was called with."""
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        define_metric=lambda name, **given: calls.append(("metric", (name, given))),
        log=lambda line: calls.append(("log", line)),
        finish=lambda: calls.append(("finish", None)),
    )

    def init(**given: Any) -> SimpleNamespace:
        calls.append(("init", given))
        return run

    fake = SimpleNamespace(init=init, util=SimpleNamespace(generate_id=lambda: "abc123"), __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_weights_and_biases_gets_one_run_however_often_it_is_resumed(
    tmp_path: Path, wandb: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not-to-be-seen")
    config = LogConfig(wandb=True, wandb_project="mine", wandb_offline=True)
    for step in (0, 1):
        with open_logs(tmp_path / "run", config, step, {"seed": 3}) as logs:
            logs.write(step + 1, {"loss": 2.0})
    first, second = (given for name, given in wandb if name == "init")
    assert first == second
    assert (first["id"], first["resume"], first["mode"]) == ("abc123", "allow", "offline")
    assert (first["project"], first["name"], first["config"]) == ("mine", "run", {"seed": 3})
    assert [given for name, given in wandb if name == "log"] == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}]
    assert ("metric", ("*", {"step_metric": "step"})) in wandb
    assert [name for name, _ in wandb].count("finish") == 2
    assert "not-to-be-seen" not in repr(wandb)
    assert all("not-to-be-seen" not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_clear_line_on_every_rank(
    package: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.train.log.logs.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"^log\.{package} = true needs the package {package}: pip install .*$"):
        open_logs(tmp_path, LogConfig(**{package: True}), 0, {}, rank=rank)


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wandb_offline .* set log\.wandb = true too"):
        LogConfig(wandb_offline=True)
    with pytest.raises(ValueError, match="wandb_project is empty"):
        LogConfig(wandb=True, wandb_project="")


def test_the_picture_has_a_panel_for_each_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with open_logs(tmp_path, LogConfig(), 0, {}) as logs:
        logs.write(1, values(1))
        assert plot_report(tmp_path) is None  # nothing to connect
        logs.write(2, {"loss": None, "gradient_norm": math.inf})
        logs.write(3, values(3))
    picture = plot_report(tmp_path)
    assert picture == tmp_path / "report.svg"
    text = picture.read_text()
    titles = ("loss", "gradient norm before clipping (logarithmic)", "learning rate", "tokens/s", "MFU", "step")
    assert all(f">{title}</text>" in text for title in titles)
    first = picture.read_bytes()
    plot_report(tmp_path)
    assert picture.read_bytes() == first


@pytest.mark.parametrize(
    ("losses", "validation", "is_logarithmic"),
    [
        ((3.0, 0.4), (), False),
        ((3.0, 0.3), (), True),
        ((3.0, 0.4), (0.3,), True),
        ((3.0, 0.0), (), False),  # which has no place on such a scale
        ((3.0, 1.0), (1.5, 2.0), False),
    ],
)
def test_the_loss_is_logarithmic_from_a_factor_of_ten_on_and_validation_lies_beside_it(
    tmp_path: Path, losses: tuple[float, ...], validation: tuple[float, ...], is_logarithmic: bool
) -> None:
    pytest.importorskip("matplotlib")
    with open_logs(tmp_path, LogConfig(), 0, {}) as logs:
        for step, loss in enumerate(losses, 1):
            logs.write(step, {"loss": loss})
        for step, loss in enumerate(validation, 1):
            logs.write(step, {"validation_loss": loss})
    assert plot_report(tmp_path) is not None
    text = (tmp_path / "report.svg").read_text()
    assert f">loss{' (logarithmic)' * is_logarithmic}</text>" in text
    assert (">validation</text>" in text) == bool(validation)


def test_no_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_logs(tmp_path, LogConfig(), 0, {}) as logs:
        logs.write(1, values(1))
        logs.write(2, values(2))
    monkeypatch.setattr("strata.train.log.picture.find_spec", lambda name: None)
    assert plot_report(tmp_path) is None


CPU = torch.device("cpu")


def train(profiler: StepProfiler, steps: int) -> None:
    """A step is three products of some milliseconds, and AdamW."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for number in range(1, steps + 1):
        with profiler.step(number):
            with record_function("strata.forward"):
                loss = model(torch.ones(2048, 512)).square().mean()
            with record_function("strata.backward"):
                loss.backward()
            with record_function("strata.update"):
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
