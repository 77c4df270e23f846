"""The scripts of `benchmarks/`: each finds what it imports, says what it lacks, and keeps what it measured."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import http_overhead, split_products
from benchmarks.gpu_lines import GpuLines, gpu_arguments
from benchmarks.http_overhead import ENDPOINTS, STREAM_PROMPT_TOKENS, measure_first_token, measure_streaming
from benchmarks.kernels_ahead import Job, makespan, report
from benchmarks.plot_serve import newest_sweep
from benchmarks.sparsity.products import DENSE, attempt, totals
from benchmarks.split_products import measure, written
from strata.cache.tables import BufferShape
from strata.engine.llm import LLM
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.engine.sampling_params import SamplingParams
from strata.hardware.replay import Timing
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.linear.quantized.split_product import SplitTile
from strata.kernels.quant.quantized import QuantizedWeight, dense, pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(str(path.relative_to(BENCHMARKS).with_suffix("")) for path in BENCHMARKS.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_finds_what_it_imports(script: str) -> None:
    if script == "sanitize" and find_spec("triton") is None:
        pytest.skip("runs Triton's kernels")
    importlib.import_module(f"benchmarks.{script.replace('/', '.')}")


@pytest.mark.parametrize("script", ["plot_gaps", "plot_serve"])
def test_asking_for_help_draws_nothing(script: str) -> None:
    pictures = sorted((BENCHMARKS.parent / "docs").glob("*.svg"))
    before = [picture.read_bytes() for picture in pictures]
    command = [sys.executable, "-m", f"benchmarks.{script}", "--help"]
    run = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("usage:")
    assert [picture.read_bytes() for picture in pictures] == before


def test_a_sweep_is_of_shares_of_a_measured_saturation(tmp_path: Path) -> None:
    """Loads at rates of their own are other measurements, however new they are."""
    lines = [
        {"started": "1", "request_rate": 40.0, "saturation": 160.0},
        {"started": "2", "request_rate": "inf", "saturation": 200.0},
        {"started": "2", "request_rate": 50.0, "saturation": 200.0},
        {"started": "2", "request_rate": 100.0, "saturation": 200.0},
        {"started": "3", "request_rate": 55.0, "saturation": None},
        {"started": "4", "request_rate": "inf", "saturation": None},
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert newest_sweep(path) == lines[1:4]


def test_results_without_a_sweep_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"started": "1", "request_rate": 55.0, "saturation": None}) + "\n")
    with pytest.raises(ValueError, match="no sweep"):
        newest_sweep(path)


def test_without_a_gpu_the_program_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["products"])
    with pytest.raises(SystemExit) as ended:
        gpu_arguments(argparse.ArgumentParser("products"))
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("products: error: needs a CUDA device, and torch sees none\n")


def test_lines_say_where_they_are_from_and_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    save = tmp_path / "lines.jsonl"
    save.write_text("{}\n")
    monkeypatch.setattr("sys.argv", ["products.py", "--rows", "1, 2", "--save", str(save)])
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows")
    asked = gpu_arguments(parser)
    lines = GpuLines("benchmarks.products", asked.save, scheme="fp8")
    for rows in asked.rows.split(","):
        lines.put({"rows": int(rows)})
    kept = [json.loads(line) for line in save.read_text().splitlines()[1:]]
    assert kept == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["rows"] for line in kept] == [1, 2]
    for line in kept:
        assert (line["device"], line["scheme"]) == ("a device", "fp8")
        assert line["command"] == f"python -m benchmarks.products --rows '1, 2' --save {save}"
        assert {"commit", "date", "torch", "triton"} <= line.keys()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_streams_get_all_their_tokens(endpoint: str) -> None:
    found = measure_streaming(endpoint, streams=4, pace=400.0, seconds=0.2)
    assert found.faults == {}
    assert found.itl_ms is not None
    assert 0 < found.tokens_per_second <= 2 * 400.0


def test_the_first_token_is_measured_with_http_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_overhead, "FIRST_TOKENS", 10)
    found = measure_first_token("completions", STREAM_PROMPT_TOKENS, rate=None)
    assert found.added_ms > 0
    assert found.engine_ttft_ms.p50 > 0


def test_an_api_process_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_overhead, "API", "strata.no_such_module")
    with pytest.raises(RuntimeError, match="No module named"), http_overhead.processes(interval=0.01):
        raise AssertionError("it is not there")


ROOT = Path(__file__).resolve().parents[2]


def in_turns(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/in_turns.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_two_checkouts_run_in_turns(tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(ROOT)
    run = in_turns(
        "strata/models/builtin", "T3-b1", f"before={tmp_path}/other", "after=.", "--turns", "1", "--calls", "1"
    )
    assert run.returncode == 0, run.stderr
    *lines, best = map(json.loads, run.stdout.splitlines())
    assert [line["checkout"] for line in lines] == ["before", "after"]
    assert best["best"] == {line["checkout"]: line["value"] for line in lines}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("builtin", "T9", "a=."), "test 'T9' is unknown"),
        (("no/such/folder", "T2", "a=."), "'no/such/folder' does not exist"),
        (("builtin", "T2", "a=/"), "a=/ is no checkout of Strata"),
        (("builtin", "T2", "."), ". is no checkout of Strata; give NAME=FOLDER"),
    ],
)
def test_what_is_wrong_is_told_without_a_traceback(options: tuple[str, ...], said: str) -> None:
    run = in_turns(*options)
    assert run.returncode != 0
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def job(noted: float, seconds: float, soon: bool = False) -> Job:
    return Job("k", noted, seconds, soon)


@pytest.mark.parametrize(
    ("jobs", "processes", "end"),
    [
        ([job(0, 1), job(0, 2), job(0, 3)], 1, 6),
        ([job(0, 1), job(0, 2), job(0, 3)], 3, 3),
        ([job(0, 1), job(0, 2), job(0, 3)], 2, 4),  # 1 then 3 beside 2
        ([job(5, 1), job(0, 1)], 2, 6),  # one is known late
        ([job(0, 2), job(0.5, 1), job(1, 4)], 1, 7),
        ([job(0, 1), job(0.1, 1), job(0.2, 1), job(0.3, 3)], 2, 4.1),  # the longest begins at 1.1
        ([job(0, 1), job(0.1, 1), job(0.2, 1), job(0.3, 3, True)], 2, 4),  # and now at 1
    ],
)
def test_who_is_done_takes_the_next(jobs: list[Job], processes: int, end: float) -> None:
    assert makespan(jobs, processes) == pytest.approx(end)


def test_all_variants_are_counted() -> None:
    jobs = [Job("a", 0, 1, False), Job("b", 1, 5, False), Job("a", 2, 2, False)]
    *kernels, whole = report("0.6B", jobs, 2)
    assert [(row["kernel"], row["variants"], row["cpu_s"]) for row in kernels] == [("b", 1, 5), ("a", 2, 3)]
    assert (whole["variants"], whole["cpu_s"], whole["longest_s"], whole["done_s"]) == (3, 8, 5, 6)


cases = importlib.import_module("benchmarks.planted.cases")


def test_steps_that_launch_eagerly_find_no_recording() -> None:
    sizes, decode = StepSizes([BufferShape(1, 1, 1)]), StepShape(1, 1, 1, decodes=True)
    assert sizes.holding(decode) == BufferShape(1, 1, 1)
    with cases.no_captured_steps(None):
        assert sizes.holding(decode) is None


def test_options_of_faults_and_of_their_mending_are_options_of_engines() -> None:
    for case in cases.CASES:
        for options in (case.options, case.mended):
            given = {"device": "cpu", "max_model_len": 128, "num_pages": 64} | dict(options)
            llm = LLM("builtin", **given)
            assert len(llm.generate("2+2=", SamplingParams(max_tokens=2))) == 1


def test_what_is_refused_has_the_text_of_its_error() -> None:
    def refused() -> Tensor:
        raise RuntimeError("cuSPARSELT not supported on your machine.\nmore")

    wanted = torch.ones(2, 3)
    assert attempt(lambda: refused, wanted, lambda call: 1.0) == {
        "error": "RuntimeError: cuSPARSELT not supported on your machine."
    }
    assert attempt(lambda: lambda: torch.ones(3, 2), wanted, lambda call: 1.0)["error"].endswith("[3, 2], not [2, 3]")
    made = attempt(lambda: lambda: 1.5 * wanted, wanted, lambda call: 2e-6)
    assert made == {"us": 2.0, "off": 0.5}


def test_only_ways_that_made_every_product_are_added_up() -> None:
    lines = [{"way": DENSE, "us": 30.0}, {"way": "2:4", "us": 20.0}, {"way": "half", "us": 1.0}]
    lines += [{"way": DENSE, "us": 10.0}, {"way": "2:4", "us": 12.0}, {"way": "half", "error": "no"}]
    assert list(totals(lines, 2)) == [
        {"product": "all", "way": DENSE, "us": 40.0, "over_bf16": 1.0},
        {"product": "all", "way": "2:4", "us": 32.0, "over_bf16": 1.25},
    ]


HOPPER = DeviceLimits("any", (9, 0), SHARED_BYTES, 132)


def plain(
    values: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, tile: SplitTile
) -> Tensor:
    assert values.shape[0] == 136
    return (values.float() * scales @ dense(weight).t()).to(dtype)


def timed(calls: Sequence[partial[Any]], **_: Any) -> Timing:
    """Of a tile the less the more columns it has, of a layer one for each call."""
    calls[0]()
    first = calls[0].args[0]
    return Timing(((300 - first.columns if isinstance(first, SplitTile) else len(calls)) * 1e-6,))


def test_the_fastest_tiles_of_a_layer_are_told_beside_the_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_products, "split_product", plain)
    monkeypatch.setattr(split_products, "time_replayed", timed)
    monkeypatch.setattr(DeviceLimits, "of", lambda _: HOPPER)
    monkeypatch.setattr(type(round_rows), "bind", lambda own, _: own.reference)
    shapes = {"wide": (10240, 128), "long": (4096, 512)}
    held = {name: [pack(torch.randn(*shape), SCHEMES["int8"])] * 3 for name, shape in shapes.items()}
    *lines, layer = measure(held, 136)
    assert {line["product"] for line in lines} == set(shapes)
    assert all(line["us"] == 300 - line["tile"]["columns"] and line["error"] < 4e-3 for line in lines)
    for name in shapes:
        own = [line for line in lines if line["product"] == name]
        assert [line["chosen"] for line in own] == [True] + [False] * (len(own) - 1)
        least = min(own, key=lambda line: line["us"])
        assert layer["fastest"][name] == written(SplitTile(**least["tile"]))
    assert layer["chosen"]["wide"] == "SplitTile(192, 256, 1, 8, 4)"
    assert layer["chosen"]["long"] == "SplitTile(192, 64, 2, 4, 6)"
    assert layer["fastest"]["long"] == "SplitTile(128, 128, 2, 8, 6)"
    assert layer["sums"] == {"chosen": 300 - 256 + 236, "fastest": 300 - 256 + 172}
    assert layer["us"] == 3
