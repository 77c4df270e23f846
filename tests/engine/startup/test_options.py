"""Options of a kind or a size that no engine has are refused by name, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from strata.engine.engine_config import EngineConfig

WHOLE = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "page_size")


@pytest.mark.parametrize("name", [*WHOLE, "decode_context_parallel_size", "eplb_step_interval"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None, [2]])
def test_numbers_are_whole_and_over_zero(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got "):
        EngineConfig("8B", **{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, [2]])
def test_how_many_run_at_once_is_whole_and_over_zero_or_left_to_the_engine(value: Any) -> None:
    with pytest.raises(ValueError, match="max_num_seqs must be an integer of at least 1, got "):
        EngineConfig("8B", max_num_seqs=value)
    assert EngineConfig("8B", max_num_seqs=None).max_sequences == 256


@pytest.mark.parametrize("name", ["overlap_tokens", "num_redundant_experts"])
@pytest.mark.parametrize("value", [-1, 1.5, "2", True])
def test_numbers_are_whole_and_not_negative(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 0"):
        EngineConfig("8B", **{name: value})


def test_one_rank_has_no_messages_that_could_travel_beside_products() -> None:
    for options in ({}, {"pipeline_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        with pytest.raises(ValueError, match=r"overlap_tokens=64 .* tensor_parallel_size=1 adds up nothing; leave it"):
            EngineConfig("8B", overlap_tokens=64, **options)
        assert EngineConfig("8B", overlap_tokens=0, **options).overlapped_from == 0
    assert EngineConfig("8B", overlap_tokens=64, tensor_parallel_size=2).overlapped_from == 64


@pytest.mark.parametrize("name", ["enable_expert_parallel", "enable_dp_attention", "enable_eplb", "deterministic"])
@pytest.mark.parametrize("value", ["false", 1, None])
def test_what_is_on_or_off_is_a_bool(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be True or False, got {value!r}"):
        EngineConfig("8B", **{name: value})
