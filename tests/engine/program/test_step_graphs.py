"""What the graphs of a step run on a device that is not here, against its table of kernels and counts on paper."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import strata
from strata.comm.symmetric import imagined
from strata.cost.nodes import total
from strata.engine.program.meta_model import MetaModel
from strata.engine.program.sizes import StepSizes
from strata.engine.program.variants import fused_products_pay
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.kernels.choose import MEASURED, thresholds_of
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard
from strata.plan.meta_model import find_config, meta_model
from tests.engine.program.programs import graph_of

pytest.importorskip("triton")

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCABULARY = 4096, 14336, 32, 8, 128, 32, 128256
QKV, GATE_UP = ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (2 * INNER, HIDDEN)
O, DOWN, HEAD = (HIDDEN, HIDDEN), (HIDDEN, INNER), (VOCABULARY, HIDDEN)
# Of one or two sequences; of more the last program of each joins what its splits have.
DECODES = ["decode_attention_kernel", "join_decodes_kernel"]
LIBRARY = ["gather_prompt_keys_kernel", "(cuDNN)"]
SAMPLING = ["filter_bounds_kernel", "gumbel_blocks_kernel", "gumbel_reduce_kernel", "(ATen)"]


@pytest.fixture(scope="module")
def model() -> MetaModel:
    """Without the library's front end, whether it is installed here or not."""
    return meta_model(find_config("8B"), device("h200")).of_sizes(attends=False)


@pytest.fixture(scope="module")
def model_with_library(model: MetaModel) -> MetaModel:
    return model.of_sizes(attends=True)


@pytest.fixture(scope="module")
def tuned() -> dict[tuple[object, ...], str]:
    """The kernel that is in the table of the H200 for an operation, a weight and a number of rows."""
    table = Path(strata.__file__).parent / "kernels" / "tuned" / "nvidia_h200.json"
    kernels = {"gemv": "gemv_kernel", "dot": "dot_kernel", None: "(cuBLAS)"}
    return {
        (entry["operation"], (entry["out"], entry["width"]), entry["rows"]): kernels[entry["parameters"].get("kernel")]
        for entry in json.loads(table.read_text())["entries"]
        if entry["dtype"] == "bfloat16"
    }


def decodes(sequences: int, length: int = 1000) -> Workload:
    return Workload((1,) * sequences, (length,) * sequences)


@pytest.mark.parametrize("sequences", [1, 2, 8, 64])
def test_small_decode_steps_run_five_kernels_a_layer_or_six(sequences: int, model: MetaModel, tuned: dict) -> None:
    step = model.step(decodes(sequences))
    assert step.graph == "decode_small_batch"
    projections = {"linear": QKV, "linear_add": O, "scaled_linear_silu_mul": GATE_UP}
    first, out, gate_up = (tuned[name, weight, sequences] for name, weight in projections.items())
    down, qkv, head = (
        tuned[name, weight, sequences]
        for name, weight in (("linear_add", DOWN), ("scaled_linear", QKV), ("scaled_linear", HEAD))
    )
    layer = [*DECODES[: 1 + (sequences <= 2)], out, gate_up, down]
    assert step.kernels == [
        "newest_tokens_kernel", "gather_tables_kernel", "embedding_kernel", "rope_angles_kernel", "rms_norm_kernel",
        first, *[*layer, qkv] * (LAYERS - 1), *layer, head, *SAMPLING,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sequences", "out", "down"),
    [
        (1, ["gemv_kernel", "one_shot_received_norm_kernel"], ["gemv_kernel", "one_shot_received_norm_kernel"]),
        # The tile of `down` divides the width.
        (8, ["dot_kernel", "one_shot_received_norm_kernel"], ["dot_kernel", "one_shot_norm_kernel"]),
        (16, ["dot_kernel", "one_shot_norm_kernel"], ["dot_kernel", "one_shot_norm_kernel"]),
    ],
)
def test_a_rank_of_two_sends_products_of_few_rows(sequences: int, out: list[str], down: list[str]) -> None:
    config = find_config("8B").with_layers((0, 1))
    shard = RankShard.of(config, 2, 0, imagined(TENSOR_AXIS, 2))
    kernels = meta_model(config, device("h200"), shard=shard).step(decodes(sequences)).kernels
    first, second = (place for place, kernel in enumerate(kernels) if kernel == "decode_attention_kernel")
    attention = DECODES[: 1 + (sequences <= 2)]
    layer = kernels[first:second]  # with the next one's q, k and v
    assert (layer[: len(attention) + 2], layer[-3:-1]) == (attention + out, down)
    assert kernels[second:][: len(layer) - 1] == layer[:-1]


def test_large_decode_steps_run_what_was_fastest_for_each_product(model: MetaModel, tuned: dict) -> None:
    step = model.step(decodes(256))
    assert step.graph == "decode_large_batch"
    qkv, out, gate_up, down, head = (tuned["linear", weight, 256] for weight in (QKV, O, GATE_UP, DOWN, HEAD))
    assert "(cuBLAS)" in (qkv, out, gate_up, down, head)
    layer = [
        qkv, "decode_attention_kernel", out, "rms_norm_kernel", gate_up, "silu_mul_kernel", down,
        "rms_norm_kernel",
    ]  # fmt: skip
    assert step.kernels[4:-4] == ["rms_norm_kernel", *layer * LAYERS, head]


@pytest.mark.parametrize(
    ("new", "attention"),
    [
        ((4096,), ["attention_kernel"]),
        ((1, 1, *(300,) * 7), [*DECODES, "attention_kernel"]),
    ],
)
def test_attention_of_steps_that_are_launched_eagerly(
    new: tuple[int, ...], attention: list[str], model: MetaModel
) -> None:
    step = model.step(Workload(new, tuple(900 if count == 1 else count + 100 for count in new)))
    assert step.graph == "logits"
    inputs = ["newest_tokens_kernel"] * (1 in new) + ["(ATen)"]
    assert [kernel for node in step.inputs for kernel in node.kernels] == inputs
    found = [list(node.kernels) for node in step.model if node.operation == "attention"]
    assert found == [attention] * LAYERS
    after = [node.operation for node in step.model[-9:]]
    assert after == [
        "attention", "index_select", "linear", "index_select", "add_rms_norm", "linear_silu_mul", "linear",
        "add_rms_norm", "linear",
    ]  # fmt: skip
    assert step.draw[0].kernels == ("gumbel_blocks_kernel", "gumbel_reduce_kernel")


@pytest.mark.parametrize("new", [(2048,), (700, 90), (1, 1, 300)])
def test_recorded_steps_with_prompts_attend_in_two_launches(new: tuple[int, ...], model: MetaModel) -> None:
    step = model.step(Workload(new, tuple(900 if count == 1 else count for count in new)))
    assert step.graph == "logits"
    assert step.kernels[:2] == ["newest_tokens_kernel", "gather_tables_kernel"]
    found = [list(node.kernels) for node in step.model if node.operation == "attention"]
    # Captured with more sequences than a kernel behind joins the splits of.
    assert found == [["decode_attention_kernel", "attention_kernel"]] * LAYERS
    assert step.kernels[-4:] == SAMPLING


@pytest.mark.parametrize(
    ("new", "attention"),
    [
        ((1,) * 30 + (8000,), "(cuDNN)"),
        ((1, 2000), "(cuDNN)"),
        ((500,), "(cuDNN)"),
        ((1024, 700), "(cuDNN)"),
        ((1, 300), "attention_kernel"),
        ((440,) * 17, "attention_kernel"),
    ],
)
def test_recorded_steps_of_few_long_prompts_attend_by_the_library(
    new: tuple[int, ...], attention: str, model_with_library: MetaModel
) -> None:
    step = model_with_library.step(Workload(new, tuple(900 if count == 1 else count for count in new)))
    inputs = ["newest_tokens_kernel", "gather_tables_kernel"]
    divided = ["query_chunks_kernel"] * (attention == "(cuDNN)")
    assert [kernel for node in step.inputs for kernel in node.kernels] == inputs + divided
    found = [node.kernels for node in step.model if node.operation == "attention"]
    assert [(kernels[0], kernels[-1]) for kernels in found] == [("decode_attention_kernel", attention)] * LAYERS


@pytest.mark.parametrize(
    ("new", "cached", "pure_prefill"),
    [
        ((8192,), 0, True),
        ((2000,), 0, True),
        ((512,) * 16, 0, True),
        ((1, 1900), 0, True),
        ((512,) * 16, 1, False),
        ((8000, 150), 0, False),  # no room for the last block of keys
    ],
)
def test_fresh_prompts_attend_over_their_own_keys(
    new: tuple[int, ...], cached: int, pure_prefill: bool, model_with_library: MetaModel
) -> None:
    """Nothing is launched for decodes, nor for what pages hold behind prompts."""
    step = model_with_library.step(Workload(new, tuple(count + cached for count in new)))
    inputs = ["newest_tokens_kernel", "gather_tables_kernel", "query_chunks_kernel"]
    assert [kernel for node in step.inputs for kernel in node.kernels] == inputs
    found = [list(node.kernels) for node in step.model if node.operation == "attention"]
    others = ["decode_attention_kernel", "gather_prompt_keys_kernel"]
    assert found == [others * (not pure_prefill) + ["(cuDNN)"]] * LAYERS


def test_float16_prompts_attend_to_gathered_keys() -> None:
    """There a prompt can have values that are not finite, and the next one would begin in the same block of keys."""
    made = meta_model(find_config("8B"), device("h200"), torch.float16).of_sizes(attends=True)
    model = made.step(Workload((2048, 2048), (2048, 2048))).model
    assert ("gather_prompt_keys_kernel", "(cuDNN)") in {node.kernels[-2:] for node in model}


@pytest.mark.parametrize(
    ("new", "attention"),
    [
        ((8000,), LIBRARY),
        ((1, 1, 500), [*DECODES, *LIBRARY]),
        ((1, 400), [*DECODES, "attention_kernel"]),
        ((440,) * 17, ["attention_kernel"]),
        ((9000,), ["attention_kernel"]),
    ],
)
def test_steps_launched_eagerly_attend_as_recorded_ones(
    new: tuple[int, ...], attention: list[str], model_with_library: MetaModel
) -> None:
    launching = replace(model_with_library, program=model_with_library.program.replaying(StepSizes((), 1 << 17)))
    step = launching.step(Workload(new, tuple(900 if count == 1 else count for count in new)))
    found = [list(node.kernels) for node in step.model if node.operation == "attention"]
    assert found == [attention] * LAYERS
    inputs = ["newest_tokens_kernel"] * (1 in new) + ["(ATen)"]
    if "(cuDNN)" in attention:
        inputs = ["newest_tokens_kernel", "gather_tables_kernel", "query_chunks_kernel"]
    assert [kernel for node in step.inputs for kernel in node.kernels] == inputs


def test_layers_with_windows_attend_without_the_library() -> None:
    config = find_config("8B")
    windows = (None, 4096) * (LAYERS // 2)
    mixed = meta_model(replace(config, windows=windows), device("h200")).of_sizes(attends=True)
    found = [node.kernels[-1] for node in mixed.step(Workload((2048,), (2049,))).model if node.operation == "attention"]
    assert found == ["(cuDNN)", "attention_kernel"] * (LAYERS // 2)


@pytest.mark.parametrize(
    ("name", "shape", "deterministic", "expected"),
    [("h200", "8B", False, True), ("h200", "8B", True, False), ("a100", "8B", False, False)],
)
def test_the_library_attends_on_a_hopper_where_its_front_end_is_installed(
    name: str, shape: str, deterministic: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for installed in (True, False):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, there=installed: object() if there else None)
        made = meta_model(find_config(shape), device(name), deterministic=deterministic)
        assert (made.program.sizes.prompt_keys > 0) == (expected and installed)


def test_gate_and_up_of_long_prompts_are_one_kernel(model: MetaModel) -> None:
    long, short = (model.step(Workload((tokens,), (tokens,))).kernels for tokens in (4096, 2048))
    assert long.count("linear_silu_mul_kernel") == LAYERS - 1  # the last layer has one row
    assert short.count("linear_silu_mul_kernel") == 0
    assert short.count("silu_mul_kernel") == LAYERS - 1  # that row takes the gate with it


@pytest.mark.parametrize("sequences", [8, 64, 80, 128, 176, 256])
def test_the_table_decides_whether_products_are_fused(sequences: int, model: MetaModel) -> None:
    small, large = (graph_of(model.program, f"decode_{which}_batch") for which in ("small", "large"))
    slow, fast = (
        {
            key: replace(
                choice, seconds=1.0 if ("add" in key.operation or "scaled" in key.operation) == fused else 1e-9
            )
            for key, choice in model.program.table.items()
        }
        for fused in (True, False)
    )
    known = thresholds_of(MEASURED)
    assert fused_products_pay(small, large, sequences, slow, known) is (sequences <= 64)
    assert fused_products_pay(small, large, sequences, fast, known)
    assert fused_products_pay(small, large, sequences, {}, known) is (sequences <= 128)


@pytest.mark.parametrize(("sequences", "alone"), [(8, "dot_kernel"), (64, "dot_kernel"), (100, "(cuBLAS)")])
def test_a_device_without_a_table_runs_what_should_do(sequences: int, alone: str) -> None:
    step = meta_model(find_config("1B"), device("h100")).step(decodes(sequences))
    products = {(node.operation, node.kernels) for node in step.model if "linear" in node.operation}
    assert products == {
        ("linear", (alone,)),
        *((name, ("dot_kernel",)) for name in ("linear_add", "scaled_linear", "scaled_linear_silu_mul")),
    }


def test_deterministic_steps_run_invariant_kernels_alone() -> None:
    step = meta_model(find_config("1B"), device("h200"), deterministic=True).step(decodes(8))
    chosen = {node.operation: node.implementation for node in step.model}
    assert (chosen["linear"], chosen["attention"]) == ("cublaslt", "triton fixed")
    assert "batch_invariant_decode_kernel" in step.kernels


@pytest.mark.parametrize("workload", [decodes(200), Workload((1, 1, 300), (900, 7, 300)), Workload((2048,), (2048,))])
def test_a_step_costs_what_its_nodes_cost(workload: Workload, model: MetaModel) -> None:
    assert total(model.step(workload).model).in_step == model.step_costs.step(workload, len(workload.new))


def test_a_step_of_fused_products_costs_as_much_but_for_the_scales_of_norms(model: MetaModel) -> None:
    workload = decodes(32)
    fused, plain = total(model.step(workload).model).in_step, model.step_costs.step(workload, 32)
    assert (fused.weights, fused.cached, fused.bytes) == (plain.weights, plain.cached, plain.bytes)
    assert fused.flops == pytest.approx(plain.flops, rel=1e-3)


def test_fused_nodes_of_a_decode_step_against_a_count_on_paper(model: MetaModel) -> None:
    sequences, length = 32, 1000
    nodes = {node.name: node.cost for node in model.step(decodes(sequences, length)).model}
    product = nodes["linear_add"]
    assert product.weights == 2 * (HIDDEN * HIDDEN + HIDDEN)
    # An addition, the norm's weight, and a square that is added up, of each element of the sum.
    assert product.flops == sequences * HIDDEN * (2 * HIDDEN + 4)
    assert product.read == product.weights + 2 * sequences * 2 * HIDDEN  # rows and residual
    assert product.written == sequences * (2 * 2 * HIDDEN + 4)  # the sum, the sum by the weight, squares
    attention = nodes["decode_attention"]
    rotated, new = (HEADS + KV_HEADS) * DIM, 2 * KV_HEADS * DIM
    assert attention.flops == sequences * (4 * HEADS * DIM * length + 3 * rotated)
    assert attention.cached == 2 * sequences * length * new
    angles_and_slot = 4 * DIM + 4
    given = 2 * (rotated + KV_HEADS * DIM) + angles_and_slot
    assert attention.read == sequences * given + 2 * sequences * (length - 1) * new
    assert attention.written == 2 * sequences * (HEADS * DIM + new)
