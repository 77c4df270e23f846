"""`strata graph --measure` runs a step on the device that is here."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from strata.bench import measured_step
from strata.hardware.figures import Device, Figure
from strata.plan.explain import ceilings
from tests.cli.graph.shown import app, run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def _measures_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of known ceilings, which are not measured then."""
    measured = (measured_figure("bandwidth", 1e10), measured_figure("compute", 1e11, "bfloat16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measured_step, "_LEAST_SECONDS", 0)
    monkeypatch.setattr(ceilings, "processor_device", lambda: (Device("mine", "My CPU", measured), ("what I know",)))


@pytest.mark.usefixtures("_measures_on_a_processor")
def test_what_takes_long_is_told_before() -> None:
    given = ["builtin", "--tokens", "1", "--measure", "--json"]
    told = CliRunner(env={"COLUMNS": "120"}).invoke(app, given, catch_exceptions=False)
    assert re.fullmatch(
        r"measuring on My CPU: 0\.0 GiB of weights and \d+ operations, one after another\n", told.stderr
    )


def measured_figure(quantity: str, value: float, dtype: str | None = None) -> Figure:
    return Figure(quantity, value, "a test", "2026-11", dtype=dtype, measured=True)


@pytest.mark.usefixtures("_measures_on_a_processor")
def test_a_step_that_is_measured_shows_what_every_operation_took(tmp_path: Path) -> None:
    drawn = tmp_path / "step.svg"
    step = ("builtin", "--context", 20, "--sequences", 2, "--measure", "--draw", drawn)
    shown = run(*step, "--json")
    assert shown["device"] == "mine"
    took = [row["measured"] for row in shown["operations"]]
    assert all(one > 0 for one in took)
    assert sum(took) == pytest.approx(sum(row["measured"] for row in shown["parts"]))
    assert shown["measured_s"] > shown["step_floor_s"] / 2  # the floor is a figure of this test
    (products,) = (row for row in shown["operations"] if row["part"] == "gate_proj&up_proj")
    assert products["count"] == 5
    texts = [one.text or "" for one in ElementTree.parse(drawn).getroot().iter(f"{SVG}text")]
    assert sum(" · took " in one for one in texts) == 9, "kernels of the layer that runs"
    assert any(one.startswith("measured: the same, ") for one in texts)
    told = run(*step)
    line = (
        r"measured +\S+ .s the step without inputs and sampling, \d+% of which is its floor; its operations \S+ .s, in"
    )
    assert re.search(line, told)
    assert "kernels" not in told, "those of a CPU have no names"
    assert "from what I know" in told


@pytest.mark.usefixtures("_measures_on_a_processor")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_cpu_is_the_processor_of_this_machine(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    shown = run("builtin", "--hardware", "cpu", "--json")
    assert (shown["device"], shown["measured_s"], shown["kernels"]) == ("mine", None, [])
    assert shown["measurements"] == ["what I know"]
    weights = 2 * shown["parameters"]
    assert weights / 1e10 < shown["step_floor_s"] < 1.01 * weights / 1e10


@pytest.mark.usefixtures("_measures_on_a_processor")
def test_a_step_is_measured_on_the_device_that_is_named() -> None:
    assert run("builtin", "--measure", "--hardware", "cpu", "--json")["measured_s"] > 0


@pytest.mark.usefixtures("_measures_on_a_processor")
def test_what_cannot_be_measured() -> None:
    said = r"device 'h200' is not here, and what is measured runs on .*: leave it out, or give cpu, the processor"
    with pytest.raises(ValueError, match=said):
        run("builtin", "--measure", "--hardware", "h200")
    with pytest.raises(ValueError, match=r"a sequence of 1,025 tokens is over the model's 1,024: it is not measured"):
        run("builtin", "--measure", "--tokens", 1025)
    with pytest.raises(ValueError, match="--measure runs a step on one device; leave out the other ranks"):
        run("builtin", "--measure", "--tensor-parallel-size", 2)
