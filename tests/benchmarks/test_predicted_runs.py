"""Which runs of results files are simulated, and with which options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan.predicted_runs import by_kind, errors, figures, offline_runs, served_options, served_runs

SERVED = {
    "engine": "strata", "model": "8B", "load": "20/s", "commit": "abc", "request_rate": 20.0, "seed": 3,
    "requests": 250, "max_concurrency": None, "data": "random prompts of 512 and answers of 128 tokens",
    "started": "2026-11-21T10", "seconds": 13.0, "ttft_ms": {"p50": 20.0}, "tpot_ms": {"p50": 5.0},
}  # fmt: skip


def test_the_newest_of_each_load_of_strata_counts(tmp_path: Path) -> None:
    newer, older, lacking = (tmp_path / name for name in ("newer", "older", "lacking"))
    lines = [SERVED | {"seconds": 14.0, "started": "2026-11-22T10"}, SERVED | {"engine": "vllm", "seconds": 1.0}]
    newer.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older.write_text("".join(json.dumps(line) + "\n" for line in [SERVED, {"test": "T5"}]))
    (run,) = served_runs([newer, older, lacking], "h200")
    assert run["measured"] == {"seconds": 14.0, "ttft_p50": 20.0, "tpot_p50": 5.0}
    assert run["command"][0] == "8B"


def test_loads_of_several_gpus_and_of_packed_weights_are_simulated_as_such(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = [SERVED, SERVED | {"tensor_parallel_size": 2, "quantization": None}, SERVED | {"quantization": "fp8"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone, divided, packed = served_runs([file], "h200")
    assert divided["command"] == [*alone["command"], "--tensor-parallel-size", "2"]
    assert packed["command"] == [*alone["command"], "--quantization", "fp8"]
    assert [run["model"] for run in (alone, divided, packed)] == ["8B"] * 3
    assert [run["run"] for run in (alone, divided, packed)] == ["20/s", "20/s on 2 GPUs", "20/s in fp8"]


def test_seconds_of_offline_tests_are_of_the_whole_call(tmp_path: Path) -> None:
    file = tmp_path / "h200.jsonl"
    common = {"model": "8B", "dtype": "bf16", "commit": "abc"}
    tests = [("T2", 4.0), ("T4", 32768.0), ("T6", 1.0)]
    file.write_text("".join(json.dumps(common | {"test": test, "value": value}) + "\n" for test, value in tests))
    assert [run["measured"]["seconds"] for run in offline_runs(file, "h200")] == [4.0 * 512 / 1e3, 1.0]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("random prompts of 512 and answers of 128 tokens", ["--input-len", "512", "--output-len", "128"]),
        (
            "shared-prefix prompts of 128 and answers of 64 tokens, 8 prefixes of 1024",
            ["--dataset", "shared-prefix", "--input-len", "128", "--output-len", "64", "--prefix-groups", "8",
             "--prefix-len", "1024"],
        ),
        (
            "lognormal prompts of 220 and answers of 190 tokens on average, each at most 2048",
            ["--dataset", "lognormal", "--input-len", "220", "--output-len", "190", "--longest", "2048"],
        ),
    ],
)  # fmt: skip
def test_a_load_is_made_anew_from_its_description(data: str, options: list[str]) -> None:
    found = served_options(SERVED | {"data": data, "max_concurrency": 256})
    common = ["--num-prompts", "250", "--request-rate", "20.0", "--seed", "3", "--max-concurrency", "256"]
    assert found == common + options


def test_other_data_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="poems"):
        served_options(SERVED | {"data": "poems"})


def test_errors_are_shares_of_what_was_measured() -> None:
    lines = [{"measured": {"seconds": 2.0}, "simulated": {"seconds": 1.0}}, {"measured": {}, "simulated": {}}]
    assert list(errors(lines, "seconds")) == [-0.5]
    assert figures({"seconds": 1.0, "ttft_ms": {"p50": 2.0}, "tpot_ms": None}) == {"seconds": 1.0, "ttft_p50": 2.0}


def test_loads_with_shared_prefixes_are_summed_up_alone() -> None:
    lines = [{"run": name, "shares": name == "cached"} for name in ("20/s", "cached", "T1")]
    assert by_kind(lines) == {"all others": [lines[0], lines[2]], "shared prefixes": [lines[1]]}
