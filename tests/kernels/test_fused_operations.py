"""Fused operations have the bits of the chains they stand for, cost less, and sum rows in the same order on CUDA."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.compile_case import CompileCase
from strata.kernels.norm.norm import add_rms_norm, rms_norm, row_tile
from strata.kernels.op import Operation
from strata.kernels.rotary.rope import rope, rope_angles
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.paged import PagedKV
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write
from tests.kernels.compiled_for import compile_for
from tests.kernels.launches.norm import ROWS, norm
from tests.kernels.launches.noted import empty
from tests.kernels.launches.state import finished_heads

DTYPES = [torch.float32, torch.bfloat16]
EVERY_WAY = [{}, {"deterministic": True}, {"differentiable": True}]
LENGTH = 40


def triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def pools(kv_heads: int, head_dim: int, dtype: torch.dtype, slots: list[int]) -> PagedKV:
    keys, values = (tuple(torch.full((4, 8, kv_heads, head_dim), torch.nan, dtype=dtype) for _ in "ab") for _ in "kv")
    index = torch.zeros(1, 4, dtype=torch.int32)
    return PagedKV(keys, values, index, index[0], torch.tensor(slots, dtype=torch.int32))


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (37, 255), (300, 64), (0, 8)])
def test_add_rms_norm_has_the_bits_of_transformers(rows: int, width: int, dtype: torch.dtype, way: dict) -> None:
    x, residual, _ = torch.randn(rows, 2 * width + 3).to(dtype).split((width, width, 3), -1)
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype)
    norm.weight.data = torch.randn(width).to(dtype)
    with torch.no_grad():
        total, normed = add_rms_norm.bind("cpu", **way)(x, residual, norm.weight, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, norm(x + residual))


@pytest.mark.parametrize("way", [{}, {"deterministic": True}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 10), (7, 1, 12), (3, 3, 16)])
@pytest.mark.parametrize("slots", [[5, 31, 0, 17, 8], [-1, 9, -1, 2, 3], [], None])
def test_qk_rope_kv_write_has_the_bits_of_its_parts(
    slots: list[int] | None, heads: int, kv_heads: int, head_dim: int, normed: bool, dtype: torch.dtype, way: dict
) -> None:
    tokens = 5 if slots is None else len(slots)
    product = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + 3).to(dtype)[:, 3:]
    weights = [torch.randn(head_dim).to(dtype) for _ in "qk"] if normed else [None, None]
    cos, sin = rope_angles(torch.randint(0, LENGTH, (tokens,)).int(), torch.randn(LENGTH, head_dim))
    mine, parts = (None if slots is None else pools(kv_heads, head_dim, dtype, slots) for _ in range(2))
    run = qk_rope_kv_write.bind("cpu", **way)
    found = run(product, *weights, cos, sin, mine, HeadsSpec(1, heads, kv_heads, 1e-5))
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in product.split(sizes, -1))
    if normed:
        q, k = (rms_norm.bind("cpu", **way)(x, weight, 1e-5) for x, weight in zip((q, k), weights, strict=True))
    q, k = (rope.bind("cpu", **way)(x, cos, sin) for x in (q, k))
    expected = (q, *kv_write.bind("cpu", **way)(k, v, parts, 1))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[2].data_ptr() == v.data_ptr()
    if mine is not None and parts is not None:
        for one, other in zip((*mine.keys, *mine.values), (*parts.keys, *parts.values), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_stand_alone(dtype: torch.dtype) -> None:
    rows = 300
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, 192), (rows, 192), (192,)))
    table, head_weight = torch.randn(rows, 24), torch.randn(24).to(dtype)
    sums = add_rms_norm.bind("cpu", deterministic=True)
    heads = qk_rope_kv_write.bind("cpu", deterministic=True)

    def run(chosen: torch.Tensor) -> list[torch.Tensor]:
        cos, sin = rope_angles.bind("cpu", deterministic=True)(chosen.int(), table)
        first = sums(x[chosen], residual[chosen], weight, 1e-5)
        return [*first, *heads(x[chosen], head_weight, head_weight, cos, sin, None, HeadsSpec(0, 4, 2, 1e-5))]

    together = run(torch.arange(rows))
    for count in (1, 2, 3, 7, 9, 33, 100):
        chosen = torch.randint(0, rows, (count,))
        for alone, all_rows in zip(run(chosen), together, strict=True):
            assert torch.equal(alone, all_rows[chosen])


def test_gradients_are_those_of_finite_differences() -> None:
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    cos, sin = rope_angles(torch.tensor([2, 0, 1]), torch.randn(4, 6, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x, y, w: add_rms_norm(x, y, w, 1e-5), (some(3, 5), some(3, 5), some(5)))
    assert torch.autograd.gradcheck(
        lambda x, q, k: qk_rope_kv_write(x, q, k, cos, sin, None, HeadsSpec(0, 2, 1, 1e-5)),
        (some(3, 24), some(6), some(6)),
    )


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def arguments(*, normed: bool, paged: bool) -> tuple[object, ...]:
    """Seven tokens of 4 query heads and 2 KV heads of 16 elements, two bytes an element."""
    weight, angles, index = (
        meta(16) if normed else None,
        meta(7, 1, 16, dtype=torch.float32),
        meta(7, dtype=torch.int32),
    )
    pool = (meta(9, 16, 2, 16),)
    pages = PagedKV(pool, pool, index, index, index) if paged else None
    return meta(7, 128), weight, weight, angles, angles, pages, HeadsSpec(0, 4, 2, 1e-5)


ROTATED, VALUES, ANGLES, SLOTS, WEIGHTS = 7 * 6 * 16 * 2, 7 * 2 * 16 * 2, 7 * 16 * 4, 7 * 4, 2 * 16 * 2
HAND_COUNTS = [
    (add_rms_norm, (meta(7, 64), meta(7, 64), meta(64), 1e-5), Cost(7 * 64 * 5, 2 * 896 + 128, 2 * 896, 128)),
    (qk_rope_kv_write, arguments(normed=False, paged=False), Cost(672 * 3, ROTATED + ANGLES, ROTATED)),
    (
        qk_rope_kv_write,
        arguments(normed=False, paged=True),
        Cost(672 * 3, ROTATED + VALUES + ANGLES + SLOTS, ROTATED + 2 * VALUES),
    ),
    (
        qk_rope_kv_write,
        arguments(normed=True, paged=True),
        Cost(672 * 7, ROTATED + VALUES + ANGLES + SLOTS + WEIGHTS, ROTATED + 2 * VALUES, WEIGHTS),
    ),
]


@pytest.mark.parametrize(("operation", "given", "expected"), HAND_COUNTS)
def test_costs_are_the_hand_counts(operation: Operation, given: tuple, expected: Cost) -> None:
    assert operation.cost(*given, workload=Workload((7,), (7,))) == expected


def test_meta_results_have_the_shape_and_dtype_of_real_ones() -> None:
    for operation, given, _ in HAND_COUNTS[:2]:
        real = [torch.zeros_like(x, device="cpu") if isinstance(x, torch.Tensor) else x for x in given]
        for found, full in zip(operation(*given), operation(*real), strict=True):
            assert found.is_meta
            assert (found.shape, found.dtype) == (full.shape, full.dtype)


@pytest.mark.parametrize("operation", [add_rms_norm, qk_rope_kv_write])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deterministic_mode_has_an_implementation(operation: Operation, device: str) -> None:
    if device == "cuda":
        pytest.importorskip("triton")
    assert operation.bind(device, deterministic=True).candidates


STRIDES = ("width", "head_dim", "token_stride", "head_stride", "x_stride", "residual_stride")


def summation(case: CompileCase, width: int, aligned: bool) -> list[str]:
    """The floating-point instructions of a kernel from the first square to the inverse root, for rows of `width`.

    Heads are summed in tiles with twice the rows and warps of those of `rms_norm`: as many elements for each thread.
    """
    tile, warps = row_tile(width)
    if "HEAD_DIM" in case.constants:
        tile, warps = {"HEAD_DIM": width, "ROWS": 2 * tile["ROWS"], "WIDTH": tile["WIDTH"]}, 2 * warps
    signature = {name: kind if aligned or name not in STRIDES else "i32" for name, kind in case.signature.items()}
    made = CompileCase(case.name, case.kernel, signature, case.constants | tile, warps, case.num_stages)
    ptx = compile_for(made).ptx
    found: list[str] = re.findall(r"^\s*((?:mul|fma|add|div|rsqrt|shfl)\.\S*(?:f32|b32))\s", ptx, re.MULTILINE)
    return found[: found.index("rsqrt.approx.ftz.f32") + 1]


# Other compilers order the sum of the widest rows otherwise; what then holds is what tests/gpu finds on the device.
@pytest.mark.skipif(not triton_version().startswith("3.6."), reason="the instructions are those of Triton 3.6")
@pytest.mark.parametrize(("width", "aligned"), [(12, False), (80, True), (128, True), (5000, False), (4096, True)])
def test_fused_kernels_sum_a_row_like_rms_norm(width: int, aligned: bool, tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    residual = empty(ROWS, width)
    (plain,), (fused,) = norm("rows", width), norm("sum", width, residual=residual)
    expected = summation(plain, width, aligned)
    assert expected[-1].startswith("rsqrt")
    assert summation(fused, width, aligned) == expected
    (rounded,) = norm("sum to int8", width, residual=residual, rounding=("int8", 0, None))
    assert summation(rounded, width, aligned) == expected
    if width <= 256:
        (heads,) = finished_heads(width, norm=True)
        assert summation(heads, width, aligned) == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gradients_are_those_that_the_parts_have(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads with norms have no gradients of their own as a whole on any device; a norm that has some is used."""
    given = []

    def norm_with_gradients(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        given.append(tuple(x.shape))
        return rms_norm.reference(x, weight, eps)

    known = [*rms_norm.implementations]
    monkeypatch.setattr(rms_norm, "implementations", known)
    monkeypatch.setattr(rms_norm, "_bound", {})
    rms_norm.implement("with gradients", "cpu", differentiable=True)(norm_with_gradients)
    product = torch.randn(9, (4 + 2 * 2) * 8, requires_grad=True)
    weights = [torch.randn(8, requires_grad=True) for _ in "qk"]
    cos, sin = rope_angles(torch.arange(9, dtype=torch.int32), torch.randn(9, 8))
    arguments = (product, *weights, cos, sin, None, HeadsSpec(0, 4, 2, 1e-5))
    chosen = qk_rope_kv_write.bind(device, differentiable=True).choose(*arguments)
    assert chosen.name == "parts"
    results = chosen.run(*qk_rope_kv_write.given(*arguments))
    assert given == [(9, 4, 8), (9, 2, 8)]
    exact = [one.detach().double().requires_grad_() for one in (product, *weights)]
    wanted = qk_rope_kv_write.reference(*exact, cos.double(), sin.double(), None, arguments[-1])
    upstream = [torch.randn_like(one) for one in results]
    torch.autograd.backward(results, upstream)
    torch.autograd.backward(wanted, [one.double() for one in upstream])
    for found, one in zip((product, *weights), exact, strict=True):
        torch.testing.assert_close(found.grad.double(), one.grad, rtol=1e-4, atol=1e-5)
