"""`strata graph`: drawings before and after the passes, measured steps, and why a kernel was taken."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from strata.bench import measured_step
from strata.cost.drawing.correspondence import correspondence
from strata.cost.drawing.why import Why, why
from strata.cost.nodes import NodeCost
from strata.engine.program.meta_model import MetaModel
from strata.hardware.figures import Device, Figure
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels import tuned
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.plan.explain import ceilings
from strata.plan.meta_model import find_config, meta_model
from tests.cli.graph.shown import app, run

SVG = "{http://www.w3.org/2000/svg}"


def test_a_drawing_has_a_box_an_operation_before_and_after_the_passes(tmp_path: Path) -> None:
    """Of 8B 516 operations become 164 in a decode step, 16 of a layer become 5; 4096 x 4096 bfloat16 are 33.6 MB."""
    drawn = tmp_path / "8b.svg"
    counts = run("8B", "--sequences", 32, "--draw", drawn, "--json")["graph"]
    root = ElementTree.parse(drawn).getroot()
    boxes = [one.get("class", "").split() for one in root.iter(f"{SVG}rect")]
    strips = [sum(count.values()) for count in (counts["captured"], counts["run"])]
    assert strips == [516, 164]
    assert sum("solid" in kinds for kinds in boxes) == sum(strips)
    assert sum(one.find(f"{SVG}title") is not None for one in root.iter(f"{SVG}rect")) == sum(strips) + 16 + 5
    texts = [one.text for one in root.iter(f"{SVG}text")]
    own = ("q_proj & k_proj & v_proj", "rope + kv_write + attention", "o_proj + post_attention_layernorm + add")
    counted = [texts.count(one) for one in (*own, "q_proj", "silu_mul", "rope", "33.6 MB", "KV")]
    assert counted == [1, 1, 1, 1, 1, 2, 3, 2]
    # Matrices of seven, two norms, and the KV pages; then four products and the KV pages: all of 16 bits.
    assert texts.count("bf16") == 7 + 2 + 1 + 4 + 1
    assert "prefers-color-scheme: dark" in drawn.read_text()


def test_what_a_kernel_stands_for_with_experts_and_norms_of_heads() -> None:
    """In Qwen3-30B-A3B the six operations between projections are one kernel."""
    meta = meta_model(config_from_dict(SHAPES["30B-A3B"] | {"num_hidden_layers": 3}, "30B-A3B"), device("h200"))
    workload = Workload((1,) * 4, (9,) * 4)
    captured, ran = meta.traced(workload), meta.step(workload).model
    found = correspondence(captured, ran)
    layer = {captured[at].module.rpartition(".")[2] + ":" + captured[at].operation: ran[own].module for at, own in
             enumerate(found) if captured[at].layer == 1}  # fmt: skip
    joined = "q_norm+k_norm+rope+kv_write+attention"
    for one in ("q_norm:rms_norm", "k_norm:rms_norm", "self_attn:rope", "self_attn:kv_write", "self_attn:attention"):
        assert layer[one].endswith(f"layers.1.self_attn.{joined}")
    assert layer["post_attention_layernorm:rms_norm"].endswith("layers.1.post_attention_layernorm+add")
    assert layer["gate:linear"].endswith("layers.1.mlp.gate")
    assert found == sorted(found)  # in the order of execution, so that edges lead downwards


@pytest.fixture
def _measures_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of known ceilings, which are not measured then."""
    measured = (measured_figure("bandwidth", 1e10), measured_figure("compute", 1e11, "bfloat16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measured_step, "_MIN_SECONDS", 0)
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


pytest.importorskip("triton")


H200 = device("h200")


def reason(model: MetaModel, workload: Workload, asked: str) -> Why:
    assert model.limits is not None
    table = tuned.read(model.limits.product)
    return why(*model.called(workload), asked, workload, model.limits, table, lambda node: float(node.cost.bytes))


@pytest.fixture(scope="module")
def dense() -> MetaModel:
    return meta_model(find_config("0.6B"), H200)


@pytest.mark.parametrize(("new", "total"), [((1,), (1000,)), ((1,) * 200, (300,) * 200), ((3000,), (3000,))])
def test_every_operation_is_taken_by_what_runs_it(
    dense: MetaModel, new: tuple[int, ...], total: tuple[int, ...]
) -> None:
    workload = Workload(new, total)
    first: dict[str, NodeCost] = {}
    for node in dense.step(workload).model:
        first.setdefault(node.operation, node)
    for operation, node in first.items():
        if node.implementation == "torch":
            continue
        found = reason(dense, workload, operation)
        assert found.taken == node.implementation, operation
        taken = next(one for one in found.candidates if one.name == found.taken)
        assert taken.kernels == node.kernels
        assert taken.predicted is not None


def test_a_listed_call_has_its_measured_times_and_is_named_by_its_part(dense: MetaModel) -> None:
    workload = Workload((1,) * 8, (1000,) * 8)
    found = reason(dense, workload, "q_proj")
    out, width = found.node.weight or (0, 0)
    listed = tuned.read("NVIDIA H200")[tuned.Key("linear", "bfloat16", out, width, 8)]
    times = {one.name: one.measured for one in found.candidates}
    assert (times[found.taken], times["cublas"]) == (listed.seconds, listed.library_seconds)
    assert "table" in found.reason


def test_a_name_that_nothing_has_is_answered_with_those_there_are(dense: MetaModel) -> None:
    with pytest.raises(ValueError, match=r"no node .* decode_attention, .*linear"):
        reason(dense, Workload((1,), (9,)), "nothing")


def test_occupancy_is_told_of_every_launch_that_the_graph_declares() -> None:
    """In order, of the model's graph; blocks of attention by hand: a program a sequence, KV head and split."""
    shown = run("0.6B", "--context", 1000, "--sequences", 32, "--occupancy", "--json")
    step = meta_model(find_config("0.6B"), H200).step(Workload((1,) * 32, (1001,) * 32))
    declared = [name for node in step.model for name in node.kernels if not name.startswith("(")]
    assert [one["name"] for one in shown["occupancy"]] == declared
    norm = next(one for one in shown["occupancy"] if one["name"] == "rms_norm_kernel")
    assert norm["blocks"] == 32
    attention = [one for one in shown["occupancy"] if one["name"] == "decode_attention_kernel"]
    assert len(attention) == 28
    assert {one["blocks"] % (32 * 8) for one in attention} == {0}
    assert all(0 < one["occupancy"]["warps"] <= 1 for one in shown["occupancy"])
