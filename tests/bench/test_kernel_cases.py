"""The calls of `strata bench kernels` without a GPU: they are valid, large enough to tell a bandwidth, and complete."""

from __future__ import annotations

import importlib
import pkgutil
from copy import deepcopy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import strata.kernels
from strata.bench.explain.plain_products import product_here, unpacked_products
from strata.bench.kernels import attention_cases
from strata.bench.kernels.case import Case
from strata.bench.kernels.cases import cases
from strata.bench.kernels.products import products
from strata.bench.needs_gpu import require_gpu, why_no_processor
from strata.kernels.op import OPERATIONS
from strata.models.config import ModelConfig, config_from_dict
from strata.models.folder import folder_or_shape
from strata.models.shapes import SHAPES
from strata.plan.explain.measurement import MeasuredStep, StepChunk
from strata.plan.meta_model import find_config, meta_model
from strata.plan.step_seconds import StepSeconds
from tests.plan.explain.runs import DEVICE

pytest.importorskip("triton")


TRAINING = {
    "linear_cross_entropy",
    "cross_entropy_gradients",
    "summed_cross_entropy",
    "adamw",
    "muon_momentum",
    "muon_update",
    "quantize",
    "scaled_product",
    "linear_fp8",
    "linear_silu_mul_fp8",
    "balance_routing",
    "partial_attention",
    "partial_attention_gradients",
}
# No shape of the benchmark has experts; the ids and the tables that a step reads are a few kilobytes.
APART = {"route", "experts", "combine", "newest_tokens", "gather_tables", "virtual_sequences", "clear_page_ends"}
# What ranks alone run. What they choose an id from, and what they count, is kilobytes.
APART |= {
    "best_of_parts",
    "count_choices",
    "held_experts",
    "sliced_linear",
    "vocabulary_embedding",
    "finish_all_reduce",
    "finish_add_rms_norm",
}
# What products by packed weights do on their way (`benchmarks.packed_products`).
APART |= {
    "round_rows",
    "rms_norm_round",
    "wide_rms_norm_round",
    "add_rms_norm_round",
    "silu_mul_round",
    "rounded_linear",
}
# Only where it is asked for (`benchmarks.sparsity.attention`).
APART |= {"block_sparse_attention", "page_sparse_attention"}


def all_cases(config: ModelConfig) -> list[Case]:
    return [*cases(config), *attention_cases.attention_cases(config)]


def tiny(shape: str) -> ModelConfig:
    smaller = {
        "hidden_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "vocab_size": 300,
        "max_position_embeddings": 128,
    }
    return config_from_dict(SHAPES[shape] | smaller, shape)


@pytest.mark.parametrize("model", ["8B", "0.6B"])
def test_every_memory_bound_operation_has_a_call_of_more_than_64_megabytes(model: str) -> None:
    most: dict[str, int] = {}
    with torch.device("meta"):
        for case in all_cases(find_config(model)):
            arguments = case.make()
            case.operation.meta(*arguments)
            name, moved = case.operation.name, case.operation.cost(*arguments, workload=case.workload).bytes
            most[name] = max(most.get(name, 0), moved)
    assert {name: moved for name, moved in most.items() if moved <= 64e6} == {}


def test_every_operation_of_inference_is_measured() -> None:
    for module in pkgutil.walk_packages(strata.kernels.__path__, "strata.kernels."):
        importlib.import_module(module.name)
    config = find_config("8B")
    measured = {case.operation.name for case in all_cases(config)}
    measured |= {product.operation for product in products("8B", config)}
    collectives = {name for name, one in OPERATIONS.items() if one.collective}
    assert measured == set(OPERATIONS) - TRAINING - APART - collectives


@pytest.mark.parametrize("shape", ["8B", "0.6B"])
def test_calls_are_valid(shape: str) -> None:
    """On the CPU, at a small size: every index is in range, and the operation computes what its reference does."""
    torch.manual_seed(0)
    ran = set()
    for case in all_cases(tiny(shape)):
        if case.rows > 2048 or sum(case.workload.total) > 6000:
            continue
        arguments = case.make()
        again = deepcopy(arguments)  # what keeps states leaves others behind
        found, wanted = case.operation(*arguments), case.operation.reference(*again)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
        ran.add(case.operation.name)
    assert ran == {case.operation.name for case in all_cases(tiny(shape))}


def test_the_library_attends_over_the_same_keys() -> None:
    """Of one sequence, whose keys a single query sees all, in whatever order the pages are."""
    torch.manual_seed(0)
    decode = next(case for case in attention_cases.attention_cases(tiny("8B")) if case.rows == 1)
    arguments = decode.make()
    wanted = decode.operation.reference(*arguments)
    with sdpa_kernel(SDPBackend.MATH):
        found = attention_cases._dense(*arguments)
    torch.testing.assert_close(found[:, :, 0], wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("model", "device", "has_gpu", "refused"),
    [
        ("8B", "auto", False, True),
        ("8B", "auto", True, False),
        ("8B", "cpu", False, False),
        ("0.6B", "auto", False, False),
        ("30B-A3B", "auto", False, True),
    ],
)
def test_large_models_need_a_gpu_where_nobody_named_a_device(
    model: str, device: str, has_gpu: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    config = find_config(model)
    assert (why_no_processor(config, device) is not None) == refused
    if refused:
        with pytest.raises(ValueError, match=f"{model}: it needs a GPU, and .* billion parameters take hours; "):
            require_gpu(model, config, device)


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 256, 704, 8, 2, 32, 5, 4096
LAYER = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER


def step(sequences: int, tokens: int) -> MeasuredStep:
    return MeasuredStep(0.0, 1.0, tuple(StepChunk(one, 0, tokens, 1) for one in range(sequences)))


def of(quantization: str | None) -> StepSeconds:
    config = find_config(folder_or_shape("builtin"))
    return StepSeconds(meta_model(config, None, torch.bfloat16, quantization=quantization), DEVICE)


def test_every_product_of_every_step_counts() -> None:
    """A product takes as many seconds as it multiplies. The last layer's rows behind attention, and the head's, are
    those that are drawn from."""
    steps = (step(2, 30), step(2, 1), step(2, 1), step(2, 1))
    found = unpacked_products(steps, of("int4"), lambda rows, out, width: float(rows * out * width), asked=True)
    assert found is not None
    kept = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM  # q, k and v of the last layer, of all its tokens
    tokens, drawn = 2 * 30 + 3 * 2, 4 * 2
    wanted = tokens * ((LAYERS - 1) * LAYER + kept) + drawn * (LAYER - kept + VOCABULARY * HIDDEN)
    assert (found.values, found.operation, found.asked) == ("int4", "linear", True)
    assert found.plain == wanted


def test_plain_weights_are_not_unpacked() -> None:
    def nobody(*_: int) -> float:
        raise AssertionError("no product has to be measured")

    assert unpacked_products((step(1, 1),), of(None), nobody, asked=False) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_product_is_measured_as_it_runs_here(deterministic: bool) -> None:
    seconds = product_here(torch.bfloat16, deterministic)
    assert 0 < seconds(1, 16, 16) < seconds(64, 1024, 512)
