"""What recurrences launch on CUDA: parallel chunks of long prompts, and one binary in deterministic mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import native_specialize_impl

from strata.engine.engine_config import EngineConfig
from strata.engine.ledger import DeviceMemory
from strata.engine.startup.memory import RankPlace, rank_memory, rank_setup, recurrent_bytes
from strata.hardware.specs import device
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.recurrent import delta_chunks_cuda, gated_delta_triton, state_space_triton
from strata.kernels.recurrent.gated_delta import gated_delta
from strata.kernels.recurrent.sequences import StateSpaceSpec
from strata.kernels.recurrent.state_space import state_space
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES
from tests.kernels.recurrent.steps import pool, step

pytest.importorskip("triton")


PARALLEL, SERIAL, SINGLE = "triton parallel chunks", "triton chunks", "triton recurrence"
BF16 = torch.bfloat16


def chunk_arguments(lengths: list[int], dims: tuple[int, int] = (128, 128), dtype: torch.dtype = BF16) -> list[Any]:
    tokens = sum(lengths)
    shapes = [(tokens, 2, dims[0]), (tokens, 2, dims[0]), (tokens, 4, dims[1]), (tokens, 4), (tokens, 4), (4,), (4,)]
    return [*(torch.zeros(shape, dtype=dtype) for shape in shapes), step(lengths), 0]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (PARALLEL, chunk_arguments([64])),
        (PARALLEL, chunk_arguments([1, 250, 1, 4])),
        (PARALLEL, chunk_arguments([200], (48, 80))),
        (SERIAL, chunk_arguments([63, 63, 63])),
        (PARALLEL, chunk_arguments([1, 66, *[1] * 31])),
        (SERIAL, chunk_arguments([1, 65, *[1] * 31])),
        (SERIAL, chunk_arguments([200], (256, 16))),
        (SERIAL, chunk_arguments([200], dtype=torch.float16)),
        (SERIAL, chunk_arguments([200], dtype=torch.float32)),
        (SINGLE, chunk_arguments([15] * 20)),
    ],
)
def test_long_prompts_are_run_in_parallel_chunks(name: str, given: list[Any]) -> None:
    assert gated_delta.bind("cuda").choose(*given).name == name
    assert gated_delta.bind("cuda", deterministic=True).choose(*given).name == SINGLE


def test_kept_states_in_other_dtypes_are_left_to_torch() -> None:
    given = chunk_arguments([200])
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
        def launch(*chunk_arguments: Any, **constants: Any) -> None:
            self.grids.append(grid)
            self.tensors += [one for one in chunk_arguments if isinstance(one, Tensor)]

        return launch


@pytest.mark.parametrize("dims", [(128, 128), (48, 80)])
def test_scratch_is_what_the_kernels_are_given(dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    given, launches = chunk_arguments([150, 70, 3], dims), Launches(monkeypatch)
    bound = gated_delta.bind("cuda")
    found = bound(*given)
    known = {one.untyped_storage().data_ptr() for one in [*given[:7], found, given[7].offsets, given[7].positions]}
    made = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in launches.tensors}
    assert bound.scratch(*given) == sum(size for place, size in made.items() if place not in known)


def test_grids_follow_from_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64: three at most in front of the last of each of three sequences."""
    for lengths in ([150, 70, 3], [1, 1, 221], [200, 23, 0]):
        launches = Launches(monkeypatch)
        gated_delta.bind("cuda")(*chunk_arguments(lengths))
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
    """Of eight heads, once for steps that are launched and once for those that are captured."""
    config = config_from_dict(SHAPES["80B-A3B"])
    asked = EngineConfig("nowhere", tensor_parallel_size=4, max_model_len=4096)
    place = RankPlace(
        torch.device("cuda"), DeviceLimits.listed(device("h200")), 0, DeviceMemory("a GPU", 141 << 30, 141 << 30)
    )
    part = rank_setup(asked, config, place)
    found = rank_memory(asked, config, place, part)
    monkeypatch.setattr("strata.engine.startup.memory.recurrent_bytes", lambda *given: 0)
    without = rank_memory(asked, config, place, part)
    more = recurrent_bytes(asked, part.config, part.sizes.max_tokens, BF16)
    assert found.activations - without.activations == found.graphs - without.graphs == more > 100 << 20


HOPPER = make_backend(GPUTarget("cuda", 90, 32))
TOKENS = 100


class Variants:
    """A kernel that does not run. variants: what each launch would have been compiled for."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.variants: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        params = self.kernel.params[: len(arguments)]
        assert not any(param.is_constexpr for param in params)
        told = [not param.do_not_specialize for param in params]
        variant = [native_specialize_impl(HOPPER, one, False, by, by) for one, by in zip(arguments, told, strict=True)]
        self.variants.append((*variant, *constants.items()))


def some(tokens: int, *shape: int) -> Tensor:
    return torch.zeros(tokens, *shape, dtype=torch.bfloat16)


def batches(shape: tuple[int, ...]) -> list[tuple[int, Batch]]:
    """Where its rows begin, and a batch: whole prompts that keep nothing, and one in pieces of which some are of a
    token, which begin at addresses that are not multiples of 16."""
    states = pool(2, ((1,), torch.float32), (shape, torch.float32))
    kept = RecurrentStates(states.tensors, torch.ones(1, dtype=torch.int32))
    pieces, done = [], 0
    for count in (37, 1, 1, 61):
        pieces.append((done, step([count], [done], kept)))
        done += count
    return [(0, step([TOKENS])), (0, step([60, 40])), (7, step([1])), *pieces]


def state_space_arguments() -> tuple[list[Tensor], list[Any], tuple[int, ...]]:
    rows = [some(TOKENS, 3, 64), some(TOKENS, 3), some(TOKENS, 1, 20), some(TOKENS, 1, 20)]
    return rows, [*some(3, 3), StateSpaceSpec(0, 0.0, 1.0)], (3, 64, 20)


def gated_delta_arguments() -> tuple[list[Tensor], list[Any], tuple[int, ...]]:
    rows = [some(TOKENS, 1, 20), some(TOKENS, 1, 20), some(TOKENS, 3, 20), some(TOKENS, 3), some(TOKENS, 3)]
    return rows, [*some(2, 3), 0], (3, 20, 20)


@pytest.mark.parametrize(
    ("operation", "module", "kernel", "given"),
    [
        (state_space, state_space_triton, "state_space_kernel", state_space_arguments),
        (gated_delta, gated_delta_triton, "gated_delta_kernel", gated_delta_arguments),
    ],
    ids=["state space", "gated delta"],
)
def test_a_recurrence_is_one_binary(
    operation: Any, module: Any, kernel: str, given: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Variants(getattr(module, kernel))
    monkeypatch.setattr(module, kernel, launches)
    rows, weights, shape = given()
    bound = operation.bind("cuda", deterministic=True)
    for first, batch in batches(shape):
        last = first + len(batch.positions)
        behind = [*weights[:-1], batch, weights[-1]]
        bound(*(one[first:last] for one in rows), *behind)
    assert len(launches.variants) == len(batches(shape))
    assert all(one == launches.variants[0] for one in launches.variants)
