"""How many sequences run at once where nobody says it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.engine.engine_config import EngineConfig
from strata.engine.ledger import DeviceMemory
from strata.engine.startup.memory import RankPlace, listed_memory, rank_memory, rank_part
from strata.engine.startup.sequences import with_sequences
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.models import weights
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from strata.plan.meta_model import find_config
from strata.plan.simulate.engine import predicted_engine


def place_on(name: str, memory: DeviceMemory | None = None) -> RankPlace:
    memory = memory or listed_memory(device(name))
    return RankPlace(torch.device("cuda"), DeviceLimits.listed(device(name)), memory=memory)


def sequences(model: str, name: str, place: RankPlace | None = None, **options: Any) -> int | None:
    asked = EngineConfig(model, load_format="dummy", **options)
    return with_sequences(asked, weights.resolve(model, "dummy")[0], place or place_on(name)).max_num_seqs


# By hand, of 0.9 of 141e9 bytes of an H200. 8B has 16.1e9 in its weights and 131,072 a token, so 448 tokens of 1,024
# sequences take 60e9, of 2,048 120e9. Products of a token take 2 * 8.0e9 / (0.71 * 989e12) = 22.9 us, its keys 448 *
# 131,072 / (0.75 * 4.8e12) = 16.3 us, and a step besides 32 * 35 us = 1.12 ms: with twice 512 it is 2.7 % faster.
# 0.6B has 1.2e9 and 114,688 a token: 2,048 take 105e9. 70B on four H100 (288e9) has 141e9 and 327,680 a token: 512 take
# 75e9, 1,024 150e9. An L4 has 24e9, of which 8B leaves 5e9 of the 7.5e9 that 128 sequences take.
@pytest.mark.parametrize(
    ("model", "name", "ranks", "count"),
    [
        ("8B", "h200", 1, 1024),
        ("0.6B", "h200", 1, 2048),
        ("70B", "h100", 4, 512),
        ("8B", "l4", 1, 256),
    ],
)
def test_as_many_as_find_room_and_make_the_engine_faster(model: str, name: str, ranks: int, count: int) -> None:
    assert sequences(model, name, tensor_parallel_size=ranks) == count


def test_a_gpu_that_others_use_has_fewer() -> None:
    """Of the 127e9 bytes of an H200 that may be used, 60e9 are."""
    total = int(device("h200").ceiling("memory").value)
    busy = place_on("h200", DeviceMemory("an H200", total - 60 * 10**9, total))
    assert sequences("8B", "h200", busy) == 512


def test_no_more_than_a_step_can_make_faster() -> None:
    """Products of 8B on an H100 take as long as on an H200, its keys longer; and half of the memory is left unused."""
    ample = DeviceMemory("a GPU", 1 << 40, 1 << 40)
    assert sequences("8B", "h200", place_on("h200", ample)) == 1024
    assert sequences("0.6B", "h200", place_on("h200", ample)) == 2048


@pytest.mark.parametrize(
    ("model", "name", "options"),
    [
        ("80B-A3B", "h100", {"tensor_parallel_size": 4}),  # the states of 1,024 sequences do not fit
        ("granite-4.0-h-tiny", "h200", {}),
        ("0.6B", "h200", {"max_model_len": 40960, "gpu_memory_utilization": 0.2}),
        ("8B", "h200", {"num_pages": 20_000}),
        ("0.6B", "h100", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ],
)
def test_where_they_take_much_memory_they_still_leave_pages_for_each(
    model: str, name: str, options: dict[str, Any]
) -> None:
    config, place = weights.resolve(model, "dummy")[0], place_on(name)
    given = with_sequences(EngineConfig(model, load_format="dummy", **options), config, place)
    assert given.max_num_seqs is not None
    ledger = rank_memory(given, config, place, rank_part(given, config, place))
    assert given.max_num_seqs == 256 or ledger.tokens >= 448 * given.max_num_seqs


def test_long_sequences_whose_ids_take_much_memory_are_fewer() -> None:
    """Ids and block tables of a sequence of 3 million tokens take 27 MB: 55e9 bytes of 2,048."""
    config = config_from_dict(SHAPES["1B"] | {"max_position_embeddings": 3 << 20})
    place = place_on("h200")
    short, long = (
        with_sequences(EngineConfig("nowhere", max_model_len=most, load_format="dummy"), config, place).max_num_seqs
        for most in (8192, 3 << 20)
    )
    assert short == 2048
    assert long is not None
    assert 256 <= long < 2048
    asked = EngineConfig("nowhere", max_model_len=3 << 20, max_num_seqs=long, load_format="dummy")
    rank_memory(asked, config, place, rank_part(asked, config, place))


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}, {"tensor_parallel_size": 2, "dtype": "float16"}],
)
def test_all_ranks_choose_alike(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their own devices have left, and whichever share of the model they have."""
    monkeypatch.setattr("strata.engine.ledger.available_memory", lambda _: pytest.fail("a rank looked at its own"))
    place = RankPlace(torch.device("cuda"), DeviceLimits.listed(device("h200")))
    ranks = EngineConfig("8B", **options).ranks
    counts = {sequences("8B", "h200", replace(place, index=index), **options) for index in range(ranks)}
    assert len(counts) == 1
    assert counts != {None}


def test_what_is_asked_for_is_had_and_a_cpu_has_the_usual_number() -> None:
    assert sequences("8B", "h200", max_num_seqs=3) == 3
    config = weights.resolve("0.6B", "dummy")[0]
    asked = with_sequences(EngineConfig("0.6B"), config, RankPlace(torch.device("cpu"), None))
    assert asked.max_sequences == 256


def test_a_simulated_engine_runs_as_many() -> None:
    asked = EngineConfig("8B", load_format="dummy")
    made = predicted_engine(asked, find_config("8B"), device("h200"))
    assert made.shape.scheduler.max_sequences == sequences("8B", "h200") == 1024
