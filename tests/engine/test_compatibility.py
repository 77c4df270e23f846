"""Options of an engine that do not go together are refused by name; each of them alone is taken."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from strata.engine.engine_config import EngineConfig

RANKS: dict[str, Any] = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
# A value of each that asks for something, with what it needs.
ASKED: dict[str, Any] = {
    "deterministic": True,
    "enable_dp_attention": True,
    "enable_eplb": True,
    "pipeline_parallel_size": 2,
    "prefill_context_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "kv_cache_dtype": "fp8",
    "sparse_prefill": 0.9,
    "decode_pages": 8,
    "message_dtype": "fp8",
    "overlap_tokens": 64,
    "all_reduce_group_size": 2,
    "quantization": "int8",
    "sparsity": "2:4",
}
# What each cannot be had with; the others with each other can.
APART = {
    "pipeline_parallel_size": {"enable_eplb", "enable_dp_attention", "prefill_context_parallel_size"},
    "enable_dp_attention": {"prefill_context_parallel_size"},
    "enable_eplb": {"deterministic", "quantization", "sparsity"},
    "quantization": {"sparsity", "deterministic"},  # with several ranks
    "sparsity": {"deterministic"},
    "sparse_prefill": {
        "decode_pages", "deterministic", "kv_cache_dtype", "prefill_context_parallel_size", "enable_dp_attention"
    },
    "decode_pages": {"deterministic", "kv_cache_dtype", "prefill_context_parallel_size", "enable_dp_attention"},
    "kv_cache_dtype": {"prefill_context_parallel_size"},
    "message_dtype": {"deterministic", "enable_dp_attention", "prefill_context_parallel_size", "overlap_tokens"},
    "all_reduce_group_size": {
        "deterministic", "enable_dp_attention", "prefill_context_parallel_size", "decode_context_parallel_size",
        "overlap_tokens",
    },
    "decode_context_parallel_size": {
        "deterministic", "enable_dp_attention", "pipeline_parallel_size", "prefill_context_parallel_size",
        "kv_cache_dtype", "sparse_prefill", "decode_pages", "message_dtype", "overlap_tokens",
    },
}  # fmt: skip


def together(one: str, other: str) -> bool:
    return other not in APART.get(one, ()) and one not in APART.get(other, ())


@pytest.mark.parametrize("name", ASKED)
def test_each_is_taken_alone_and_with_what_it_goes_along_with(name: str) -> None:
    EngineConfig("8B", **RANKS, **{name: ASKED[name]})
    for other in ASKED.keys() - {name}:
        if together(name, other):
            EngineConfig("8B", **RANKS, **{name: ASKED[name], other: ASKED[other]})


@pytest.mark.parametrize(("one", "other"), [pair for pair in combinations(ASKED, 2) if not together(*pair)])
def test_two_that_do_not_go_together_are_both_named(one: str, other: str) -> None:
    with pytest.raises(ValueError, match="leave out one of") as refused:
        EngineConfig("8B", **RANKS, **{one: ASKED[one], other: ASKED[other]})
    assert one in str(refused.value)
    assert other in str(refused.value)


@pytest.mark.parametrize(
    "other",
    [
        {"deterministic": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"passes": "exact"},
        {"sparse_prefill": 0.9},
        {"decode_pages": 8},
    ],
    ids=str,
)
def test_torch_compile_is_to_compare_with_and_takes_none_of_them(other: dict[str, Any]) -> None:
    ((name, value),) = other.items()
    with pytest.raises(ValueError, match=f"executor='compile' and {name}={value!r} are not there together"):
        EngineConfig("8B", executor="compile", **other)
