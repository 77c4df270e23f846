"""What `LLM` may be called with: names, types, and the options of vLLM's that ask for nothing."""

from __future__ import annotations

import inspect
from dataclasses import fields
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig
from strata.engine.given.options import VLLM_OPTIONS


def test_a_call_is_declared_with_every_option_its_type_and_default() -> None:
    declared = inspect.signature(LLM).parameters
    options = {field.name: field for field in fields(EngineConfig)}
    assert set(declared) == {*options, "verbose"}
    for name in set(options) - {"model"}:
        assert declared[name].default == options[name].default
        assert declared[name].annotation == options[name].type
        assert declared[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_package_says_that_it_has_types() -> None:
    assert files("strata").joinpath("py.typed").is_file()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("max_modle_len", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("dtpye", "dtype"),
        ("modle", "model"),
        ("trust_remote_cod", "trust_remote_code"),
    ],
)
def test_a_mistyped_option_is_told_what_was_meant(given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"{given}'; did you mean {meant}\?$"):
        LLM("builtin", **{given: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": False, "enforce_eager": True, "swap_space": 4, "disable_log_stats": True},
        {"enforce_eager": False, "tokenizer": None, "revision": None, "enable_chunked_prefill": True},
        {"data_parallel_size": 1, "hf_overrides": {}, "cpu_offload_gb": 0, "distributed_executor_backend": "mp"},
        {
            "limit_mm_per_prompt": {"image": 0},
            "served_model_name": "a",
            "load_format": "safetensors",
            "rope_scaling": None,
        },
    ],
)
def test_options_of_vllm_that_ask_for_nothing_are_taken(options: dict[str, Any]) -> None:
    assert EngineConfig.from_options("8B", {"max_num_seqs": 4, **options}) == EngineConfig("8B", max_num_seqs=4)


@pytest.mark.parametrize("name", [name for name, foreign in VLLM_OPTIONS.items() if foreign.taken is not None])
def test_options_of_vllm_that_ask_for_more_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}='something else' is not taken: "):
        EngineConfig.from_options("8B", {name: "something else"})


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"dtype": torch.bfloat16, "device": torch.device("cpu")}, {"dtype": "bfloat16", "device": "cpu"}),
        (
            {"max_model_len": np.int64(64), "gpu_memory_utilization": np.float32(0.5), "deterministic": np.True_},
            {"max_model_len": 64, "gpu_memory_utilization": 0.5, "deterministic": True},
        ),
    ],
)
def test_values_of_vllm_torch_and_numpy_are_those_that_they_stand_for(
    options: dict[str, Any], same: dict[str, Any]
) -> None:
    made = EngineConfig.from_options("8B", options)
    assert made == EngineConfig.from_options("8B", same)
    for name, value in same.items():
        assert type(getattr(made, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "value"), [("model", 5), ("model", ["a"]), ("model", b"a"), ("verbose", "yes"), ("verbose", 1)]
)
def test_a_model_or_verbose_of_another_type_is_refused_in_one_sentence(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be ") as refused:
        LLM(**{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(refused.value)


def test_no_option_of_its_own_is_taken_for_one_of_vllm_that_asks_for_nothing() -> None:
    assert not set(VLLM_OPTIONS) & {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", "4k"),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("dtype", 16),
        ("dtype", ["float32"]),
        ("kv_cache_dtype", ["fp8"]),
        ("device", 0),
        ("passes", None),
        ("quantization", 4),
        ("sparsity", {}),
        ("seed", "one"),
        ("tpot_target_ms", "20"),
        ("ttft_target_ms", "300"),
        ("sparse_prefill", "half"),
        ("executor", None),
        ("load_format", 0),
        ("message_dtype", None),
        ("decode_pages", 2.5),
    ],
)
def test_a_value_of_another_type_is_refused_in_one_sentence(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        LLM("builtin", **{name: value})  # type: ignore[arg-type]
    assert repr(value) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_sampling_parameter_of_another_type_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        SamplingParams(**{name: object})  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
