"""The log of a run: what a resumed run drops, TensorBoard's files as its own reader sees them, Weights & Biases through
a stand-in for the package, what is missing, full disks, and the picture.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strata.train.log.config import LogConfig
from strata.train.log.json_lines import JsonLines, read_lines
from strata.train.log.logs import Logs, open_logs
from strata.train.log.picture import plot_report


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
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
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
    monkeypatch.delitem(sys.modules, "strata.train.log.weights_and_biases", raising=False)
    yield calls
    sys.modules.pop("strata.train.log.weights_and_biases", None)


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
