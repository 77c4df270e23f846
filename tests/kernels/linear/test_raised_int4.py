"""Four-bit integers whose codes stay raised in products of few rows: order, what sums lose, instructions."""

from __future__ import annotations

import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from strata.kernels.linear.packed import few_rows
from strata.kernels.linear.packed.few_rows import PackedProduct, dot_shapes, launch
from strata.kernels.linear.skinny_tiles import SkinnyTile
from strata.kernels.quant import raised_int4
from strata.kernels.quant.packed import PackedWeight, Scheme
from tests.kernels.compiled_for import case_of, compile_for, longest_loop

from .assembly import halves, run

pytest.importorskip("triton")

# All bytes, each in each of the four places.
WORDS = [bytes((first + 64 * place) % 256 for place in range(4)) for first in range(256)]


def test_raised_codes_and_columns_of_x_come_in_one_order() -> None:
    numbers = torch.randperm(256)[:8].bfloat16()  # all other than each other
    columns = {number: column for column, number in enumerate(numbers.tolist())}
    first, *others = (pair & 0xFFFFFFFF for pair in numbers.view(torch.int32).tolist())
    pairs = run(raised_int4.RAISED_ORDER_ASSEMBLY.value, first, 4, *others)
    order = [columns[number] for pair in pairs for number in halves(pair)]
    assert [column % 2 for column in order] == [0, 0, 0, 0, 1, 1, 1, 1]
    for word in WORDS:
        codes = [half for byte in word for half in (byte & 15, byte >> 4)]
        raised = run(raised_int4.RAISED_INT4_ASSEMBLY.value, int.from_bytes(word, "little"), 4)
        assert [number for pair in raised for number in halves(pair)] == [codes[column] + 128 for column in order]


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_raised_sums_lose_no_more_than_was_said(mean: float) -> None:
    """Float32 sums of sixteen columns at a time, as tensor cores make them, which round towards zero."""
    x, codes = (torch.randn(500, 128) + mean).bfloat16().double(), torch.randint(0, 16, (500, 128)).double()

    def summed(values: Tensor) -> Tensor:
        total = torch.zeros(500, dtype=torch.float64)
        for products in (values * x).split(16, 1):
            exact = total + products.sum(1)
            rounded = exact.float().double()
            step = torch.nextafter(rounded.float(), torch.zeros(500)).double()
            total = torch.where(rounded.abs() > exact.abs(), step, rounded)
        return total

    lost = summed(codes + 128) - summed(torch.full_like(codes, 136)) - ((codes - 8) * x).sum(1)
    assert lost.abs().max() > 0
    assert (lost.abs() <= 8 * 2**-23 * 280 * x.abs().sum(1)).all()
    # Beside what rounding a result to bfloat16 loses, of the columns of one group.
    assert lost.norm() <= 0.02 * 2**-9 * ((codes - 8) * x).sum(1).norm()


# Instructions of the loop for each weight of a thread. While each was made less 8, the first took 3.2.
MOST = {(32, 2): 2.8, (64, 1): 1.75, (64, 2): 2.05, (128, 2): 1.75}


@pytest.mark.parametrize(("columns", "warps", "stages", "rows"), dot_shapes(1))
def test_weights_take_few_instructions(
    columns: int, warps: int, stages: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    out, width = 4096, 14336
    values = torch.empty(out, width // 2, dtype=torch.uint8, device="meta")
    weight = PackedWeight.of(Scheme("int4", 1, 128), values, torch.empty(out, width // 128, device="meta"))
    x, residual = (torch.empty(1, size, dtype=torch.bfloat16, device="meta") for size in (width, out))
    norm_weight = torch.empty(out, dtype=torch.bfloat16, device="meta")
    tile = SkinnyTile("dot", columns, 128, warps, stages, splits=4, rows=rows)
    with mock.patch.object(few_rows, "split_counters", return_value=torch.empty(1, dtype=torch.int32, device="meta")):
        product = PackedProduct(x, weight, residual=residual, norm_weight=norm_weight)
        compiled = compile_for(case_of(launch(product, tile)))
    assert compiled.spills == 0
    # Four neighbours a thread of both operands: the order in which they are unpacked is right for no other number.
    assert set(re.findall(r"opIdx = \d, parent = #mma, kWidth = (\d+)", compiled.ttgir)) == {"4"}
    loop = longest_loop(compiled.cubin)
    weights = columns * tile.width // (32 * warps)
    assert loop.count("HMMA") == weights // 8 + tile.width // 16  # eight weights each, and sums of x once
    assert len(loop) <= MOST[columns, warps] * weights
