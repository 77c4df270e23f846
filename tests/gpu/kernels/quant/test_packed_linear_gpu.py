"""Products by packed weights on CUDA against float64 over what each weight stands for: every kind, tile and way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.split_products import candidates
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.linear import linear
from strata.kernels.linear.prenorm import linear_add, scaled_linear, scaled_linear_silu_mul
from strata.kernels.linear.quantized.small_m import chosen_tile, dot_shapes, dot_tiles, quantized_tile
from strata.kernels.linear.quantized.split_product import split_product
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.linear.small_m_tiles import QUANTIZED_IMPLEMENTATION, SmallMTile
from strata.kernels.quant.dequantize import dequantize
from strata.kernels.quant.expand import can_expand, expand_on_device
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, dense, pack, round_activations
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES, SPARSITIES
from strata.kernels.quant.two_of_four import smallest_two_of_four
from strata.kernels.split_counters import split_counters
from tests.gpu.tensors import assert_a_chain_waits, assert_near, assert_within, draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

EPS = 1e-5
# Beside those that users can name: what ranks, other groups and merges leave of them.
OTHERS = {
    "a scale a weight": Scheme("e4m3", 0, 0),
    "rows of blocks": Scheme("e4m3", 1, 128, "block"),
    "halves of groups": Scheme("int4", 1, 64),
    "small groups": Scheme("int4", 1, 32),
    "int4 by rows": Scheme("int4", 1, 0),
    "int8 in groups": Scheme("int8", 1, 128),
}
ALL = dict(SCHEMES) | OTHERS
SPARSE = SPARSITIES["2:4"]


def draw_weight(out: int, width: int, scheme: Scheme, dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    """dtype: of sparse ones."""
    if scheme == SPARSE:
        return pack(draw_sparse(out, width, dtype), SPARSE)
    weight = torch.randn(out, width, device="cuda") * torch.randn(out, 1, device="cuda").exp() * width**-0.5
    return pack(weight, scheme)


def draw_sparse(out: int, width: int, dtype: torch.dtype) -> Tensor:
    """Dense; some fours have one value or none."""
    weight = draw(out, width, dtype=dtype) * width**-0.5
    weight = weight.masked_fill(smallest_two_of_four(weight.abs()), 0.0)
    weight[:, : width // 8].masked_fill_(torch.rand(out, width // 8, device="cuda") < 0.5, 0.0)
    return weight


def odd(weight: QuantizedWeight, zeros: torch.dtype = torch.uint8) -> QuantizedWeight:
    """With zeros and columns in an order of their own."""
    drawn = torch.randint(0, 16, weight.scales.shape, device="cuda").to(zeros)
    return weight._replace(zeros=drawn, order=torch.randperm(weight.shape[1], device="cuda").int())


def exact_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.double(), dense(weight).double(), None if bias is None else bias.double())


def limits() -> DeviceLimits:
    return DeviceLimits.of(torch.device("cuda", torch.cuda.current_device()))


def tiles(rows: int, weight: QuantizedWeight) -> list[SmallMTile]:
    """That of the rule, and of each shape that it may choose the one that divides columns among most programs."""
    out, width = weight.shape
    group = weight.columns if weight.columns < width and weight.scheme != SPARSE else 0
    asked = (rows, out, width, weight.kind, group)
    found = [quantized_tile(*asked, limits())]
    found += [tile for shape in dot_shapes(rows) for tile in dot_tiles(shape, *asked)[-1:]]
    return [tile for tile in found if tile is not None]


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [*((scheme, torch.bfloat16) for scheme in (*ALL.values(), SPARSE)), (SPARSE, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize(
    ("out", "width", "several"), [(1008, 2048, (1, 3, 16, 200)), (33, 4096, (2, 30)), (4096, 14336, (1, 64))]
)
def test_few_rows_in_every_shape_of_tile(
    scheme: Scheme, dtype: torch.dtype, out: int, width: int, several: tuple[int, ...]
) -> None:
    weight, bias = draw_weight(out, width, scheme, dtype), draw(out, dtype=dtype)
    for rows in several:
        x = draw(rows, 2 * width, dtype=dtype)[:, width:]
        exact = exact_linear(x, weight, bias)
        if scheme == SPARSE:
            assert linear.bind("cuda", packed=True).choose(x, weight, bias).name == QUANTIZED_IMPLEMENTATION
        found = tiles(rows, weight)
        assert found
        for tile in found:
            (result,) = multiply(SmallMProduct(x, weight, bias), tile)
            assert_near(result, exact)
            assert torch.equal(multiply(SmallMProduct(x, weight, bias), tile)[0], result)
    assert not split_counters(bias.device).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4", "small groups", "int4 by rows"])
def test_one_row_by_int4_of_any_range(name: str, dtype: torch.dtype) -> None:
    """Far from zero; of very large and very small numbers side by side, or in groups of their own; and of none."""
    weight = draw_weight(272, 4096, ALL[name])
    x = draw(1, 4096, dtype=dtype)
    far, mixed, apart = x + 4, x.clone(), x.clone()
    mixed[:, ::7] *= 500
    apart[:, :2048] *= 2.0**-14
    for one in (x, far, mixed, apart, torch.zeros_like(x)):
        for given in (weight, odd(weight)):
            assert_near(linear(one, given, None), exact_linear(one, given))
    for value in (torch.inf, torch.nan):
        x[0, 1000] = value
        assert linear(x, weight, None).isnan().all()


@pytest.mark.parametrize("zeros", [torch.uint8, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int4", "small groups", "int4 by rows"])
def test_zeros_and_orders_of_columns(name: str, zeros: torch.dtype) -> None:
    weight = odd(draw_weight(272, 1024, ALL[name]), zeros)
    for rows in (1, 7, 40, 200):
        x = draw(rows, 1024)
        assert linear.bind("cuda", packed=True).choose(x, weight, None).name == QUANTIZED_IMPLEMENTATION
        assert_near(linear(x, weight, None), exact_linear(x, weight))
    assert torch.equal(dequantize(weight, torch.float32), dense(weight._replace(order=None)))
    whole = odd(draw_weight(272, 1024, ALL["int8_weights"]))
    assert torch.equal(dequantize(whole, torch.float32), dense(whole._replace(order=None)))
    exact = exact_linear(x, whole)
    assert_within(linear(x, whole, None), exact, 5e-3)


@pytest.mark.parametrize("scheme", [*ALL.values(), SPARSE], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16, 50, 256])
def test_what_products_end_in(scheme: Scheme, rows: int) -> None:
    """By the registry: a residual and a norm, a norm's scale, gates."""
    hidden, inner = 1024, 1536
    x, residual, norm_weight = draw(rows, inner), draw(rows, hidden + 24)[:, 8 : hidden + 8], draw(hidden)
    down, gate_up = draw_weight(hidden, inner, scheme), draw_weight(2 * inner, hidden, scheme)
    bias = draw(2 * inner)
    total, weighted, squares = linear_add(x, down, None, residual, norm_weight)
    assert (
        linear_add.bind("cuda", packed=True).choose(x, down, None, residual, norm_weight).name
        == QUANTIZED_IMPLEMENTATION
    )
    assert_near(total, exact_linear(x, down) + residual.double())
    assert torch.equal(weighted, total * norm_weight)
    torch.testing.assert_close(squares.double().sum(-1), total.double().square().sum(-1), rtol=1e-5, atol=0)
    scale = torch.rsqrt(squares.double().sum(-1, keepdim=True) / hidden + EPS)
    exact = exact_linear(weighted, gate_up) * scale + bias.double()
    assert_near(scaled_linear(weighted, squares, EPS, gate_up, bias), exact)
    gated = F.silu(exact[:, :inner]) * exact[:, inner:]
    assert_near(scaled_linear_silu_mul(weighted, squares, EPS, gate_up, bias), gated)
    plain = exact_linear(weighted, gate_up, bias)
    chosen = linear_silu_mul.bind("cuda", packed=True).choose(weighted, gate_up, bias).name
    if scheme == SPARSE or chosen == QUANTIZED_IMPLEMENTATION:
        wanted = F.silu(plain[:, :inner]) * plain[:, inner:]
        assert_near(linear_silu_mul(weighted, gate_up, bias), wanted)


def test_rows_stand_alone_in_one_tile() -> None:
    for name in ("fp8", "int4", "fp8_block", "nvfp4"):
        weight, x = draw_weight(200, 2048, ALL[name]), draw(64, 2048)
        for tile in tiles(64, weight):
            together = multiply(SmallMProduct(x, weight), tile)[0]
            for rows in (1, 5, 33):
                chosen = torch.randint(0, 64, (rows,), device="cuda")
                alone = multiply(SmallMProduct(x[chosen], weight), tile)[0]
                if tile.program_rows(rows) == tile.program_rows(64):
                    assert torch.equal(alone, together[chosen]), f"{tile}: other bits among {rows} rows"


@pytest.mark.parametrize("kind", ["e4m3", "int8"])
@pytest.mark.parametrize(("columns", "static"), [(0, None), (128, None), (0, 0.013)])
@pytest.mark.parametrize("shape", [(1, 64), (7, 200), (300, 4096), (33, 14336), (5, 28672)])
def test_rounded_rows_are_the_reference_to_the_bit(
    shape: tuple[int, int], columns: int, static: float | None, kind: str
) -> None:
    x = draw(shape[0], shape[1] + 8)[:, 8:] * torch.exp(4 * torch.randn(shape[0], 1, device="cuda")).bfloat16()
    x[0, : shape[1] // 2] = 0
    assert round_rows.bind("cuda").choose(x, kind, columns, static).name == "triton"
    found, wanted = (
        round_rows.bind("cuda")(x, kind, columns, static),
        round_rows.reference(x.cpu(), kind, columns, static),
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8))
    x[-1, 3] = torch.nan
    _, scales = round_rows.bind("cuda")(x, kind, columns, static)
    assert scales[-1, 0].isnan()
    assert scales[:-1].isfinite().all()


# The relative error (of norms) that rounding the result and, of e4m3, sums of 14 bits leave.
ROUNDED = {"rounded, cublas": 2e-2, "rounded, split": 2e-2, "rounded, triton": 5e-3}


@pytest.mark.parametrize(
    ("name", "static"),
    [("fp8", None), ("int8", None), ("fp8_block", None), ("rows of blocks", None), ("fp8", 0.01), ("int8", 0.03)],
)
@pytest.mark.parametrize("rows", [33, 65, 127, 256, 333, 2048])
@pytest.mark.parametrize(("out", "width"), [(1024, 3072), (6144, 4096), (4096, 14336), (8320, 256), (272, 1040)])
def test_many_rows_in_8_bits(name: str, static: float | None, rows: int, out: int, width: int) -> None:
    weight, x, bias = draw_weight(out, width, ALL[name])._replace(input_scale=static), draw(rows, width), draw(out)
    chosen = linear.bind("cuda", packed=True).choose(x, weight, bias)
    by_rows, whole = name in ("fp8", "int8"), "rounded, cublas" if name == "fp8" else "rounded, triton"
    assert chosen.name == ("rounded, split" if by_rows and rows <= 256 and width % 128 == 0 else whole)
    rows_read = round_activations(x.cpu(), weight.scheme, static).cuda().double()
    exact = F.linear(rows_read, dense(weight).double(), bias.double())
    result = chosen.run(x, weight, bias)
    assert_within(result, exact, ROUNDED[chosen.name])
    if name == "int8":
        assert_near(result, exact)
    gated = linear_silu_mul(x, weight, bias)
    gate, up = result.double().chunk(2, -1)
    assert (gated.double() - F.silu(gate) * up).norm() <= 1e-2 * gated.double().norm()


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("rows", [33, 97, 136, 250])
@pytest.mark.parametrize(("out", "width"), [(6160, 4096), (4096, 14336), (28672, 1024)])
def test_split_products_in_every_tile_that_could_serve(name: str, rows: int, out: int, width: int) -> None:
    """Twice, for counters that the first left."""
    weight, x, bias = draw_weight(out, width, ALL[name]), draw(rows, width), draw(out)
    values, scales = round_rows.bind("cuda")(x, weight.kind, 0)
    exact = F.linear(values.double() * scales.double(), dense(weight).double(), bias.double())
    found = candidates(rows, out, width, limits().processors)
    assert len(found) >= 3
    for tile in found:
        first, second = (split_product(values, scales, weight, bias, x.dtype, tile) for _ in range(2))
        assert (first.double() - exact).norm() <= ROUNDED["rounded, split"] * exact.norm(), tile
        if name == "int8":
            assert_near(first, exact)
        assert torch.equal(first, second), tile
    assert not split_counters(bias.device).any()


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4", "fp8_weights", "int8_weights", "small groups"])
def test_many_rows_with_the_weight_in_floats(name: str) -> None:
    weight, bias = draw_weight(1000, 1056, ALL[name]), draw(1000)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(dequantize(weight, dtype), dense(weight, dtype))
    x = draw(700, 1056)
    chosen = linear.bind("cuda", packed=True).choose(x, weight, bias)
    assert chosen.name == "dequantized, cublas"
    exact = exact_linear(x, weight, bias)
    assert_within(chosen.run(x, weight, bias), exact, 5e-3)


@pytest.mark.parametrize("scheme", [*(ALL[name] for name in ("fp8", "int4", "fp8_block")), SPARSE], ids=str)
def test_bits_of_rows_in_any_company(scheme: Scheme) -> None:
    weight, x = draw_weight(520, 1024, scheme), draw(300, 1024)
    bound = linear.bind("cuda", deterministic=True, packed=True)
    together = bound(x, weight, None)
    exact = exact_linear(x, weight)
    assert_within(together, exact, 5e-3)
    for rows in (1, 2, 65, 129):
        assert torch.equal(bound(x[:rows], weight, None), together[:rows])


def test_what_kernels_cannot_read_is_served_in_floats() -> None:
    """Widths that fill no 16 bytes, groups that fit no block, types other than 16-bit floats."""
    for scheme, width, dtype in (
        (Scheme("int8", 1, 0, "row"), 100, torch.bfloat16),
        (Scheme("int4", 1, 24), 96, torch.bfloat16),
        (Scheme("int4", 1, 3), 96, torch.bfloat16),
        (Scheme("e4m3", 1, 0, "row"), 128, torch.float32),
    ):
        weight, x = draw_weight(40, width, scheme), draw(5, width, dtype=dtype)
        assert linear.bind("cuda", packed=True).choose(x, weight, None).name == "dequantized, cublas"
        exact = exact_linear(x, weight)
        assert_within(linear(x, weight, None), exact, 1e-2)


def test_empty_and_leading_dimensions() -> None:
    weight = draw_weight(96, 1024, ALL["fp8"])
    x = draw(3, 5, 1024)
    assert_near(linear(x, weight, None), exact_linear(x, weight))
    assert linear(x[:0], weight, None).shape == (0, 5, 96)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "width"), [(1, 8), (33, 264), (1000, 1056), (4096, 14336)])
def test_expanded_sparse_weights_are_the_dense_ones_to_the_bit(dtype: torch.dtype, out: int, width: int) -> None:
    plain = draw_sparse(out, width, dtype)
    weight = pack(plain, SPARSE)
    assert can_expand(weight)
    assert torch.equal(expand_on_device(weight), plain)
    assert torch.equal(dense(weight, dtype), plain)


@pytest.mark.parametrize(("rows", "out", "width"), [(257, 1024, 3072), (1000, 272, 1040), (32769, 512, 1024)])
def test_many_rows_over_the_dense_weight_of_a_sparse_one(rows: int, out: int, width: int) -> None:
    plain, x, bias = draw_sparse(out, width, torch.bfloat16), draw(rows, width), draw(out)
    weight = pack(plain, SPARSE)
    chosen = linear.bind("cuda", packed=True).choose(x, weight, bias)
    assert chosen.name == "2:4 expanded, cublas"
    assert torch.equal(chosen.run(x, weight, bias), F.linear(x, plain, bias))


def test_sparse_weights_that_kernels_cannot_read_are_served_in_floats() -> None:
    """Widths that fill no block, another type, leading dimensions, no rows."""
    for width, dtype in ((104, torch.bfloat16), (1024, torch.float32)):
        weight = pack(draw_sparse(40, width, dtype), SPARSE)
        x = draw(3, 5, width, dtype=dtype)
        exact = exact_linear(x, weight)
        assert_within(linear(x, weight, None), exact, 1e-2)
        assert linear(x[:0], weight, None).shape == (0, 5, 40)


def test_many_rows_of_a_sparse_weight_in_parts() -> None:
    hidden, inner, rows = 1024, 1536, 300
    x, residual, norm_weight = draw(rows, inner), draw(rows, hidden + 24)[:, 8 : hidden + 8], draw(hidden)
    down, gate_up, bias = draw_weight(hidden, inner, SPARSE), draw_weight(2 * inner, hidden, SPARSE), draw(2 * inner)
    total, weighted, squares = linear_add(x, down, None, residual, norm_weight)
    torch.testing.assert_close(total.double(), exact_linear(x, down) + residual.double(), rtol=2e-2, atol=2e-2)
    scale = torch.rsqrt(squares.double().sum(-1, keepdim=True) / hidden + EPS)
    exact, plain = exact_linear(weighted, gate_up) * scale + bias.double(), exact_linear(weighted, gate_up, bias)
    gated, alone = (F.silu(one[:, :inner]) * one[:, inner:] for one in (exact, plain))
    assert_within(scaled_linear(weighted, squares, EPS, gate_up, bias), exact, 1e-2)
    assert_within(scaled_linear_silu_mul(weighted, squares, EPS, gate_up, bias), gated, 1e-2)
    assert_within(linear_silu_mul(weighted, gate_up, bias), alone, 1e-2)


@pytest.mark.parametrize(
    ("scheme", "rows"),
    [
        *((ALL[name], rows) for name in ("fp8", "int8", "int4", "fp8_block", "nvfp4") for rows in (1, 16, 64, 512)),
        *((SPARSE, rows) for rows in (1, 300, 4096)),
    ],
    ids=str,
)
def test_a_recorded_chain_reads_what_the_launch_before_wrote(
    scheme: Scheme, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # to poison the results would put kernels between the launches
    weights = [draw_weight(2048, 2048, scheme) for _ in range(5)]
    x = draw(rows, 2048)
    if rows <= 16:  # each waits for the one before it
        assert chosen_tile(x, weights[0]) is not None
    assert_a_chain_waits(linear.bind("cuda", packed=True), x, [(weight, None) for weight in weights])
