"""`strata bench comm` on gloo ranks: a line for each collective, size and algorithm, and bad input in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strata.bench.comm.measure import CommResult
from strata.cli.bench.comm import comm, parse_sizes

COMMAND = [sys.executable, "-m", "strata", "bench", "comm", "--device", "cpu", "--repeat", "2"]


def test_lines_of_two_ranks(tmp_path: Path) -> None:
    saved = tmp_path / "comm.jsonl"
    command = [*COMMAND, "--sizes", "4KiB,64", "--dtype", "float32", "--save", str(saved), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [json.loads(line) for line in saved.read_text().splitlines()]
    algorithms = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1}
    assert [(one["operation"], one["bytes"]) for one in lines] == [
        (name, size) for name, count in algorithms.items() for size in (64, 4096) for _ in range(count)
    ]
    assert {one["algorithm"] for one in lines if one["operation"] == "all_reduce"} == {"gloo", "in rank order"}
    sent = {one["operation"]: one["sent"] for one in lines if one["bytes"] == 4096}
    assert sent == {"all_reduce": 4096, "all_gather": 2048, "reduce_scatter": 2048, "all_to_all": 2048}
    for one in lines:
        assert (one["test"], one["ranks"], one["dtype"], one["unit"]) == ("comm", 2, "fp32", "us")
        assert len(one["all"]) == 2
        assert one["value"] > 0
        assert one["model"] is None  # of a link that is not known
        assert one["command"].startswith("strata bench comm")


def test_sizes_that_ranks_cannot_share_are_refused_by_all_in_one_line() -> None:
    done = subprocess.run([*COMMAND, "--sizes", "6"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "6 bytes are no 2 equal parts of bf16 numbers; give multiples of 4" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "all_reduce,gossip"}, "'gossip' is unknown; known are all_reduce, all_gather"),
        ({"dtype": "int3"}, "'int3' is unknown; known are"),
        ({"device": "tpu"}, "'tpu' is unknown; give auto, cpu or cuda"),
        ({"device": "cuda", "ranks": 1000}, "1000 ranks need a GPU each, and there are"),
        ({"sizes": "8KB"}, "takes bytes, such as 512, 8KiB or 1MiB"),
        ({"sizes": "0"}, "not '0'"),
    ],
)
def test_bad_input_is_one_clear_line(options: dict[str, object], message: str) -> None:
    given = {"operations": "all_reduce", "sizes": "64", "ranks": None, "device": "cpu", "dtype": "float32", "repeat": 1}
    with pytest.raises(ValueError, match=message) as error:
        comm(**given | options)
    assert "\n" not in str(error.value)


def test_sizes() -> None:
    assert parse_sizes("512, 8KiB,3MiB,1GiB") == [512, 8192, 3 << 20, 1 << 30]


def test_text_has_the_model_beside_what_was_measured() -> None:
    times = ([23.0, 24.5, 26.0], 30.1, 2.52)
    found = CommResult("comm", "all_reduce", "nccl", 2, 65536, 65536, "bf16", 24.5, "us", *times, "NVIDIA H200")
    assert found.text() == (
        "all_reduce of 64 KiB over 2 ranks, nccl: 24.5 us; a library by the model 30.1, floor 2.52; 2.67 GB/s sent"
    )
