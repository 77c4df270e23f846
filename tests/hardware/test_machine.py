"""What the system's files say of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.hardware.machine import cpu_name, numa_node, processor
from strata.hardware.replay import Timing


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_caches_and_nodes(tmp_path: Path) -> None:
    cache = tmp_path / "cpu" / "cpu0" / "cache"
    kinds = [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M"), ("3", "Unified", "1G")]
    for index, texts in enumerate(kinds):
        for name, text in zip(("level", "type", "size"), texts, strict=True):
            write(cache / f"index{index}" / name, text)
    for node in range(2):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
    found = processor(tmp_path)
    assert found.caches == {"1d": 48 << 10, "2": 2 << 20, "3": 1 << 30}
    assert found.nodes == 2


def test_this_machine_has_cores_and_memory() -> None:
    found = processor()
    assert found.name == cpu_name() != ""
    assert found.cores >= 1
    assert found.memory > 1 << 28


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    found = processor(tmp_path)
    assert (found.caches, found.nodes) == ({}, 0)


def test_the_node_of_a_gpu(tmp_path: Path) -> None:
    write(tmp_path / "0000:1b:00.0" / "numa_node", "1")
    write(tmp_path / "0000:3c:00.0" / "numa_node", "-1")
    assert numa_node("0000:1B:00.0", tmp_path) == 1
    assert numa_node("0000:3c:00.0", tmp_path) is None
    assert numa_node("0000:ff:00.0", tmp_path) is None


def test_the_median_counts_whatever_single_runs_took() -> None:
    assert Timing((2.0, 100.0, 1.0)).seconds == 2.0


def test_median_of_an_even_number_lies_between() -> None:
    assert Timing((1.0, 4.0, 2.0, 100.0)).seconds == pytest.approx(3.0)
