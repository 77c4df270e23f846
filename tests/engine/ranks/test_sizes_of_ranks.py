"""What each rank reserves: steps of the same sizes, whatever part of the weights it has, and pages for more tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strata.engine.engine_config import EngineConfig, EngineSizes
from strata.engine.ledger import DeviceMemory
from strata.engine.ranks.rank import share_of
from strata.engine.startup.memory import planned_memory
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import config_from_dict
from strata.models.save import save
from strata.models.shapes import SHAPES
from tests.parallel.models import random_model
from tests.parallel.shards import divisible_config

LIMITS = DeviceLimits.listed(device("h200"))
CUDA = torch.device("cuda")


@pytest.mark.parametrize("tensor", [2, 4])
def test_ranks_with_an_expert_more_record_the_same_sizes_of_steps(tensor: int) -> None:
    """What one rank sends in a recorded step has the length that the others take."""
    whole = config_from_dict(SHAPES["30B-A3B"], "30B-A3B")
    assert whole.experts is not None
    config = replace(whole, experts=replace(whole.experts, count=5))
    asked = EngineConfig("30B-A3B", tensor_parallel_size=tensor, enable_expert_parallel=True, deterministic=True)
    shards = [share_of(asked, config, rank) for rank in range(tensor)]
    sizes = [EngineSizes.of(asked, one.config, CUDA, LIMITS, one) for one in shards]
    assert len({one.weight_bytes for one in sizes}) == 2
    assert all(one.recorded == sizes[0].recorded for one in sizes)


@pytest.mark.parametrize("tensor", [1, 2])
def test_all_stages_record_the_same_sizes_of_steps(tensor: int) -> None:
    """They hold different parts of the weights, and what one sends has the length that the next one takes."""
    config = config_from_dict(SHAPES["8B"], "8B")
    asked = EngineConfig("8B", pipeline_parallel_size=2, tensor_parallel_size=tensor)
    shards = [share_of(asked, config, rank) for rank in (0, tensor)]
    first, last = (EngineSizes.of(asked, one.config, CUDA, LIMITS, one) for one in shards)
    assert first.recorded == last.recorded
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
