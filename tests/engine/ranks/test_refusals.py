"""What cannot be divided among ranks is refused before anything starts, with what to give instead."""

from __future__ import annotations

from typing import Any

import pytest

from strata import LLM
from strata.engine.engine_config import EngineConfig
from strata.engine.ranks import world
from strata.engine.ranks.rank import share_of
from strata.engine.startup.divided_keys import check_gathered_heads
from strata.engine.startup.kept_states import check_states
from tests.parallel.models import config_of
from tests.parallel.shards import divisible_config

TENSOR = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, "needs enable_expert_parallel=True and a tensor_parallel_size over 1"),
        ({"num_redundant_experts": 2}, "is room for copies, which enable_eplb=True makes"),
        ({"num_redundant_experts": -1}, "must be an integer of at least 0, got -1"),
        ({"eplb_step_interval": 0}, "eplb_step_interval must be an integer of at least 1, got 0"),
        (
            {"enable_eplb": True, "enable_expert_parallel": True, "deterministic": True, **TENSOR},
            "its bits depend on what else runs",
        ),
        ({"enable_dp_attention": True}, "needs enable_expert_parallel=True and a tensor_parallel_size over 1"),
        ({"enable_dp_attention": True, **TENSOR}, "for engines that share nothing give data_parallel"),
        ({"message_dtype": "fp4"}, "message_dtype 'fp4' is unknown; use auto, fp8, fp8_e4m3"),
        (
            {"message_dtype": "fp8"},
            "message_dtype='fp8' rounds what ranks add up, and tensor_parallel_size=1 adds up nothing; leave it out",
        ),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 3},
            r"size=3 divides keys among .*size=4.* needs 3 ranks for each KV head",
        ),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig("8B", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, got 0"),
        ({"tensor_parallel_size": 1.5}, "tensor_parallel_size must be an integer"),
        ({"prefill_context_parallel_size": 0}, "prefill_context_parallel_size must be an integer of at least 1, got 0"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide the 8 attention heads"),
        ({"pipeline_parallel_size": 99}, "pipeline_parallel_size=99: each stage needs a layer"),
        ({"enable_expert_parallel": True, **TENSOR}, "enable_expert_parallel=True needs a mixture of experts"),
        (
            {"enable_expert_parallel": True, "enable_dp_attention": True, **TENSOR},
            r"needs a mixture of experts.* give data_parallel_size instead",
        ),
    ],
)
def test_what_cannot_be_divided_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(device="cpu", verbose=False, **options)


@pytest.mark.parametrize(
    ("options", "family", "message"),
    [
        (
            {"tensor_parallel_size": 7, "message_dtype": "fp8"},
            "llama",
            "tensor_parallel_size=7 does not divide hidden_size = 24",
        ),
        *(
            (
                {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
                family,
                "decode_context_parallel_size=2 is not there for .*, which has layers with windows",
            )
            for family in ("mistral", "gpt-oss")
        ),
    ],
)
def test_models_that_cannot_are_refused_before_weights_are_read(
    options: dict[str, Any], family: str, message: str
) -> None:
    config = config_of(family) if "message_dtype" in options else divisible_config(family)
    with pytest.raises(ValueError, match=message):
        check_states(EngineConfig("8B", **options), config)


def test_more_heads_than_kernels_take_are_refused_on_gpus() -> None:
    """48 of 8 ranks: the reference would wait for the device in every layer, which no captured step can."""
    config = divisible_config("llama", num_attention_heads=48, num_key_value_heads=1, hidden_size=96)
    for key_ranks in (1, 2, 4, 8):
        asked = EngineConfig("8B", tensor_parallel_size=8, decode_context_parallel_size=key_ranks)
        own = share_of(asked, config, 0).config
        check_gathered_heads(asked, own, "cpu")
        if key_ranks < 8:
            check_gathered_heads(asked, own, "cuda")
    with pytest.raises(
        ValueError, match=r"size=8 gathers 48 query heads for a KV head, .* at most 32; accepted are 1, 2, 4"
    ):
        check_gathered_heads(asked, own, "cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size=4 needs 4 GPUs, and torch sees 2"),
        (
            {"prefill_context_parallel_size": 2, **TENSOR},
            "prefill_context_parallel_size=2 and tensor_parallel_size=2 needs 4 GPUs, and torch sees 2",
        ),
        ({"device": "cuda:1", **TENSOR}, r"device 'cuda:1' is one GPU.*CUDA_VISIBLE_DEVICES"),
    ],
)
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        LLM(**{"device": "auto", **options})
    assert EngineConfig("8B", tensor_parallel_size=2).resolve_device(1).index == 1


def test_without_a_port_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_HOST", "192.0.2.1")  # of no machine
    with pytest.raises(ValueError, match=r"no port of 192\.0\.2\.1 can be listened on"):
        LLM(tensor_parallel_size=2, device="cpu", verbose=False)
