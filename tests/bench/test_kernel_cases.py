"""The calls of `strata bench kernels` without a GPU: they are valid, large enough to tell a bandwidth, and complete."""

from __future__ import annotations

import importlib
import pkgutil
from copy import deepcopy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import strata.kernels
from strata.bench.kernels import attention_cases
from strata.bench.kernels.case import Case
from strata.bench.kernels.cases import cases
from strata.kernels.op import OPERATIONS
from strata.models.config import ModelConfig, config_from_dict
from strata.models.shapes import SHAPES
from strata.plan.meta_model import find_config

pytest.importorskip("triton")

from strata.bench.kernels.products import products

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
APART = {"route", "experts", "combine", "newest_tokens", "gather_tables", "virtual_sequences"}
# What ranks alone run. What they choose an id from, and what they count, is kilobytes.
APART |= {
    "best_of_parts",
    "count_choices",
    "local_experts",
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
