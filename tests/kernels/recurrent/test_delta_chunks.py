"""Prompts of the gated delta rule on CUDA: which kernels run them, over what, and how much memory they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from strata.engine.engine_config import EngineConfig
from strata.engine.ledger import DeviceMemory
from strata.engine.startup.memory import RankPlace, rank_memory, rank_part
from strata.engine.startup.recurrent_scratch import recurrent_bytes
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.recurrent import delta_chunks_cuda
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from tests.kernels.recurrent.steps import pool, step

PARALLEL, SERIAL, SINGLE = "triton parallel chunks", "triton chunks", "triton recurrence"
BF16 = torch.bfloat16


def arguments(lengths: list[int], dims: tuple[int, int] = (128, 128), dtype: torch.dtype = BF16) -> list[Any]:
    tokens = sum(lengths)
    shapes = [(tokens, 2, dims[0]), (tokens, 2, dims[0]), (tokens, 4, dims[1]), (tokens, 4), (tokens, 4), (4,), (4,)]
    return [*(torch.zeros(shape, dtype=dtype) for shape in shapes), step(lengths), 0]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (PARALLEL, arguments([64])),
        (PARALLEL, arguments([1, 250, 1, 4])),
        (PARALLEL, arguments([200], (48, 80))),
        (SERIAL, arguments([63, 63, 63])),
        (PARALLEL, arguments([1, 66, *[1] * 31])),
        (SERIAL, arguments([1, 65, *[1] * 31])),
        (SERIAL, arguments([200], (256, 16))),
        (SERIAL, arguments([200], dtype=torch.float16)),
        (SERIAL, arguments([200], dtype=torch.float32)),
        (SINGLE, arguments([15] * 20)),
    ],
)
def test_long_prompts_are_run_in_parallel_chunks(name: str, given: list[Any]) -> None:
    assert gated_delta.bind("cuda").choose(*given).name == name
    assert gated_delta.bind("cuda", deterministic=True).choose(*given).name == SINGLE


def test_kept_states_in_other_dtypes_are_left_to_torch() -> None:
    given = arguments([200])
    states = replace(pool(2, ((1,), torch.float32), ((4, 128, 128), BF16)), slots=torch.zeros(1, dtype=torch.int32))
    given[7] = step([200], None, states)
    assert gated_delta.bind("cuda").choose(*given).name == "chunks"


class Launches:
    """Kernels that do not run: their names, grids and arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.tensors: list[Tensor] = []
        for kernel in delta_chunks_cuda.KERNELS:
            monkeypatch.setattr(delta_chunks_cuda, kernel.__name__, self)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.grids.append(grid)
            self.tensors += [one for one in arguments if isinstance(one, Tensor)]

        return launch


@pytest.mark.parametrize("dims", [(128, 128), (48, 80)])
def test_scratch_is_what_the_kernels_are_given(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    given, launches = arguments([150, 70, 3], dims), Launches(monkeypatch)
    bound = gated_delta.bind("cuda")
    found = bound(*given)
    known = {one.untyped_storage().data_ptr() for one in [*given[:7], found, given[7].offsets, given[7].positions]}
    made = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in launches.tensors}
    assert bound.scratch(*given) == sum(size for place, size in made.items() if place not in known)


def test_grids_follow_from_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64: three at most in front of the last of each of three sequences."""
    for lengths in ([150, 70, 3], [1, 1, 221], [200, 23, 0]):
        launches = Launches(monkeypatch)
        gated_delta.bind("cuda")(*arguments(lengths))
        assert launches.grids == [((3 + 3) * 4,), (2, 4, 3), ((3 + 3) * 4,)]


def test_memory_is_planned_for_the_largest_step() -> None:
    """Of the published Qwen3-Next, with a sequence more for padding. Of 4,096 tokens not more than 2,048 are run so."""
    config = config_from_dict(SHAPES["80B-A3B"])
    asked = EngineConfig("nowhere", max_num_seqs=40)
    each = 2 * (64 * 64 + 64 * 128 + 128 * 128) + 4 * 4 * 64
    assert recurrent_bytes(asked, config, 4096, BF16) == (64 + 41) * 32 * each
    many = EngineConfig("nowhere", max_num_seqs=4096)
    assert recurrent_bytes(many, config, 4096, BF16) == (64 + 2048) * 32 * each
    assert recurrent_bytes(replace(asked, deterministic=True), config, 4096, BF16) == 0
    assert recurrent_bytes(asked, config, 4096, torch.float32) == 0
    assert recurrent_bytes(asked, replace(config, recurrence=None), 4096, BF16) == 0


def test_ranks_of_a_gpu_set_it_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight heads, once for steps that are launched and once for those that are recorded."""
    config = config_from_dict(SHAPES["80B-A3B"])
    asked = EngineConfig("nowhere", tensor_parallel_size=4, max_model_len=4096)
    place = RankPlace(
        torch.device("cuda"), DeviceLimits.listed(device("h200")), 0, DeviceMemory("a GPU", 141 << 30, 141 << 30)
    )
    part = rank_part(asked, config, place)
    found = rank_memory(asked, config, place, part)
    monkeypatch.setattr("strata.engine.startup.memory.recurrent_bytes", lambda *given: 0)
    without = rank_memory(asked, config, place, part)
    more = recurrent_bytes(asked, part.config, part.sizes.max_tokens, BF16)
    assert found.activations - without.activations == found.graphs - without.graphs == more > 100 << 20
