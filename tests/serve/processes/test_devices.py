"""Which GPUs an engine of several sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.serve.processes.launch import engine_devices


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The device files of a machine with four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def _visible(found: list[dict[str, str]]) -> list[str]:
    return [one["CUDA_VISIBLE_DEVICES"] for one in found]


def test_each_engine_has_gpus_of_its_own(files: Path) -> None:
    assert _visible(engine_devices(4, 1, "auto", {}, files)) == ["0", "1", "2", "3"]
    assert _visible(engine_devices(2, 2, "cuda", {}, files)) == ["0,1", "2,3"]


def test_only_gpus_that_are_shown_are_given(files: Path) -> None:
    shown = {"CUDA_VISIBLE_DEVICES": "3, GPU-abc"}
    assert _visible(engine_devices(2, 1, "auto", shown, files)) == ["3", "GPU-abc"]


@pytest.mark.parametrize(("engines", "device"), [(1, "auto"), (1, "cuda:1"), (2, "cpu")])
def test_one_engine_or_a_cpu_needs_nothing(files: Path, engines: int, device: str) -> None:
    assert engine_devices(engines, 1, device, {}, files) == [{}] * engines


def test_a_machine_without_gpus_serves_from_its_cpu_unless_gpus_are_asked_for(tmp_path: Path) -> None:
    assert engine_devices(2, 1, "auto", {}, tmp_path) == [{}, {}]
    with pytest.raises(ValueError, match="needs 2 GPUs, and there are 0"):
        engine_devices(2, 1, "cuda", {}, tmp_path)


def test_too_few_gpus_and_one_gpu_for_all_are_refused(files: Path) -> None:
    with pytest.raises(ValueError, match="data_parallel_size=3 with 2 ranks each needs 6 GPUs, and there are 4"):
        engine_devices(3, 2, "auto", {}, files)
    with pytest.raises(ValueError, match="'cuda:0' is one GPU"):
        engine_devices(2, 1, "cuda:0", {}, files)
