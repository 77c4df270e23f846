"""Why a kernel runs a node: the same one that the step runs, beside what else could, with what the table lists."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from strata.cost.drawing.why import Why, why
from strata.cost.nodes import NodeCost
from strata.engine.program.meta_model import MetaModel
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels import tuned
from strata.plan.meta_model import find_config, meta_model
from tests.cli.graph.shown import run

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


def test_occupancy_is_of_one_gpu() -> None:
    with pytest.raises(ValueError, match="--occupancy compiles a GPU's kernels, of one rank"):
        run("0.6B", "--occupancy", "--tensor-parallel-size", 2)
