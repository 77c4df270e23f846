"""Before ranks start: what cannot be divided is refused with what to give instead, and all reserve the same sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM
from strata.engine.compatibility import check_gathered_heads, check_states
from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.ledger import DeviceMemory
from strata.engine.ranks import world
from strata.engine.ranks.rank import share_of
from strata.engine.startup.memory import planned_memory
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import config_from_dict
from strata.models.save import save
from strata.models.shapes import SHAPES
from tests.parallel.models import config_of, random_model
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


LIMITS = DeviceLimits.listed(device("h200"))
CUDA = torch.device("cuda")


@pytest.mark.parametrize("tensor", [2, 4])
def test_ranks_with_an_expert_more_record_the_same_sizes_of_steps(tensor: int) -> None:
    """What one rank sends in a captured step has the length that the others take."""
    whole = config_from_dict(SHAPES["30B-A3B"], "30B-A3B")
    assert whole.experts is not None
    config = replace(whole, experts=replace(whole.experts, count=5))
    asked = EngineConfig("30B-A3B", tensor_parallel_size=tensor, enable_expert_parallel=True, deterministic=True)
    shards = [share_of(asked, config, rank) for rank in range(tensor)]
    sizes = [EngineSizes.of(asked, one.config, CUDA, LIMITS, one) for one in shards]
    assert len({one.weight_bytes for one in sizes}) == 2
    assert all([*one.captured] == [*sizes[0].captured] != [] for one in sizes)


@pytest.mark.parametrize("tensor", [1, 2])
def test_all_stages_record_the_same_sizes_of_steps(tensor: int) -> None:
    """They hold different parts of the weights, and what one sends has the length that the next one takes."""
    config = config_from_dict(SHAPES["8B"], "8B")
    asked = EngineConfig("8B", pipeline_parallel_size=2, tensor_parallel_size=tensor)
    shards = [share_of(asked, config, rank) for rank in (0, tensor)]
    first, last = (EngineSizes.of(asked, one.config, CUDA, LIMITS, one) for one in shards)
    assert [*first.captured] == [*last.captured] != []
    assert first.max_tokens == last.max_tokens == 4096
    assert first.weight_bytes != last.weight_bytes
    whole = EngineSizes.of(EngineConfig("8B"), config, CUDA, LIMITS)
    own = tensor * (first.weight_bytes + last.weight_bytes)
    assert own == pytest.approx(whole.weight_bytes, rel=0.02)  # rotary tables
    assert first.pool.layers + last.pool.layers == whole.pool.layers


def test_memory_of_ranks_that_divide_keys_holds_more_tokens(tmp_path: Path) -> None:
    """What a rank has for pages is what it has without: pages stand for more tokens."""
    config = divisible_config("llama", num_key_value_heads=1)
    save(random_model(config, torch.float32), config, tmp_path)
    ledgers = []
    for key_ranks in (1, 2, 4):
        asked = EngineConfig(
            str(tmp_path), device="cpu", tensor_parallel_size=4, decode_context_parallel_size=key_ranks, page_size=4
        )
        shard = share_of(asked, config, 1)
        sizes = EngineSizes.of(asked, shard.config, torch.device("cpu"), None, shard)
        memory = DeviceMemory("cpu", 1 << 34, 1 << 34)
        ledgers.append(planned_memory(asked, shard.config, sizes, torch.device("cpu"), memory))
    assert len({ledger.page_bytes for ledger in ledgers}) == 1
    assert [ledger.page_size for ledger in ledgers] == [4, 8, 16]
