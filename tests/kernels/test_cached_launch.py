"""Launches that are held: the binary is the one that Triton would have chosen, and everything else goes to Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, native_specialize_impl

from strata.kernels import cached_launch
from strata.kernels.cached_launch import CachedKernel

pytestmark = pytest.mark.skipif(not cached_launch.HOLDS, reason="another version of Triton")
HOPPER = CUDABackend(GPUTarget("cuda", 90, 32))
GRID = (3, 2)


class OnGpu:
    """What both sides ask of a tensor."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_launch, "_TENSORS", frozenset({OnGpu, torch.Tensor}))


TENSORS = st.builds(OnGpu, st.sampled_from([torch.bfloat16, torch.float32, torch.int32]), st.integers(0, 64))
NUMBERS = st.one_of(st.integers(-40, 40), st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**40, 2**63, 10**6]))
ARGUMENT = st.one_of(TENSORS, NUMBERS, st.floats(allow_nan=False), st.none(), st.booleans())


def by_triton(arguments: tuple[Any, ...], specialize: bool) -> list[Any]:
    return [native_specialize_impl(HOPPER, one, False, specialize, specialize) for one in arguments]


@given(pair=st.lists(st.tuples(ARGUMENT, ARGUMENT), max_size=6), specialize=st.booleans())
def test_arguments_that_are_held_alike_are_compiled_alike(pair: list[tuple[Any, Any]], specialize: bool) -> None:
    cached_launch._TENSORS = frozenset({OnGpu})
    one, other = tuple(left for left, _ in pair), tuple(right for _, right in pair)
    found, also = cached_launch.specialization(one), cached_launch.specialization(other)
    if found is not None and also is not None and found[0] == also[0]:
        assert by_triton(one, specialize) == by_triton(other, specialize)


def scale(x, out, count, stride, factor, BLOCK: tl.constexpr, FAST: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at * stride, tl.load(x + at * stride) * factor, mask=at < count)


class Subject:
    """A kernel whose compilations and launches are written down instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.scratch = 0
        self.device = 0
        monkeypatch.setattr(cached_launch, "current_device", lambda: self.device)
        monkeypatch.setattr(cached_launch, "current_stream", lambda device: 100 + device)
        monkeypatch.setattr(JITFunction, "run", self._run)
        self.kernel = CachedKernel(scale)

    def _run(self, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        self.asked.append(args)
        compiled = object.__new__(CompiledKernel)
        launcher = object.__new__(CudaLauncher)
        launcher.global_scratch_size = self.scratch
        launcher.profile_scratch_size = 0
        launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
        launcher.launch = lambda *given: self.launched.append(given)
        compiled._run, compiled.function, compiled.packed_metadata = launcher, 7, (4, 1, 0)
        return compiled

    def __call__(self, *args: Any, **constants: Any) -> None:
        self.kernel[GRID](*args, **{"BLOCK": 32, "FAST": True} | constants)


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    return Subject(monkeypatch)


X = OnGpu(torch.float32, 4096)


def test_the_second_launch_passes_addresses_and_numbers_to_the_launcher(subject: Subject) -> None:
    subject(X, X, 17, 16, 0.5)
    subject(OnGpu(torch.float32, 8192), X, 19, 32, 0.25)
    assert len(subject.asked) == 1
    (launched,) = subject.launched
    assert launched[:7] == (3, 2, 1, 100, 7, False, True)
    assert launched[7:13] == (None, None, (4, 1, 0), None, None, None)
    assert launched[13:] == (8192, 4096, 19, 32, 0.25, None, None)


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((OnGpu(torch.float32, 4100), X, 17, 16, 0.5), {}),
        ((OnGpu(torch.bfloat16, 4096), X, 17, 16, 0.5), {}),
        ((X, X, 1, 16, 0.5), {}),
        ((X, X, 16, 16, 0.5), {}),
        ((X, X, 17, 17, 0.5), {}),
        ((X, X, 2**40, 16, 0.5), {}),
        ((X, None, 17, 16, 0.5), {}),
        ((X, X, 17, 16, 1), {}),
        ((X, X, 17, 16, 0.5), {"BLOCK": 64}),
        ((X, X, 17, 16, 0.5), {"FAST": False}),
        ((X, X, 17, 16, 0.5), {"num_warps": 8}),
        ((X, torch.zeros(4), 17, 16, 0.5), {}),
    ],
)
def test_whatever_differs_goes_to_triton(subject: Subject, args: tuple[Any, ...], constants: dict[str, Any]) -> None:
    subject(X, X, 17, 16, 0.5)
    subject(*args, **constants)
    assert len(subject.asked) == 2
    assert not subject.launched


def test_another_device_has_a_binary_of_its_own(subject: Subject) -> None:
    subject(X, X, 17, 16, 0.5)
    subject.device = 1
    subject(X, X, 17, 16, 0.5)
    assert len(subject.asked) == 2
    subject(X, X, 17, 16, 0.5)
    assert subject.launched[0][3] == 101


def test_kernels_with_scratch_memory_or_constants_by_position_are_never_held(subject: Subject) -> None:
    for _ in range(2):
        subject.kernel[GRID](X, X, 17, 16, 0.5, 32, FAST=True)
        subject.kernel[GRID](X, X, 17, 16, factor=0.5, BLOCK=32, FAST=True)
    subject.scratch = 8
    for _ in range(2):
        subject(X, X, 17, 16, 0.5)
    assert len(subject.asked) == 6


def test_hooks_around_launches_hear_of_all(subject: Subject) -> None:
    subject(X, X, 17, 16, 0.5)
    chain = triton.knobs.runtime.launch_enter_hook
    hook = lambda metadata: None  # noqa: E731
    chain.add(hook)
    try:
        subject(X, X, 17, 16, 0.5)
    finally:
        chain.remove(hook)
    assert len(subject.asked) == 2
