"""The calls of `benchmarks.sanitize` that have weights in fewer bits, or rows that are rounded for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.cases import EPS, randn
from strata.kernels.activation.quantized_silu_mul import silu_mul_round
from strata.kernels.linear.quantized.many_rows import quantized_call
from strata.kernels.linear.quantized.split_product import SplitTile, split_product
from strata.kernels.linear.quantized_linear import by_tiles
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.moe.calls import ExpertsCall
from strata.kernels.moe.grouped import grouped_product
from strata.kernels.moe.small_m import by_choices
from strata.kernels.norm.norm import add_rms_norm_round
from strata.kernels.op import Operation
from strata.kernels.quant.dequantize import dequantize
from strata.kernels.quant.expand import expand_on_device
from strata.kernels.quant.quantized import pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES, SPARSITIES

ROWS = 70


def packed_calls(out: int, width: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Products by weights [out, width], and what makes their operands, on torch's default device."""
    yield from _rounding(width)
    for name, rows, tile in (
        ("fp8", 2, SmallMTile("gemv", 4, 512, 4)),
        ("int4", 1, SmallMTile("gemv", 16, 1024, 1)),
        ("int4", 40, SmallMTile("dot", 64, 128, 4, 3, 2, rows=32)),
        ("mxfp4", 7, SmallMTile("dot", 16, 128, 2, 3, 1, rows=16)),
    ):
        weight = pack(randn(out, width), SCHEMES[name])
        yield f"{name} x{rows} {tile}", partial(multiply, SmallMProduct(randn(rows, width), weight), tile)
        yield f"dequantize {name}", partial(dequantize, weight, torch.bfloat16)
    for name in ("fp8_block", "int8"):
        operands = randn(ROWS, width), pack(randn(out, width), SCHEMES[name])
        yield f"rounded_product {name}", lambda operands=operands: by_tiles(quantized_call(*operands))
    values = torch.randint(-127, 127, (ROWS, width), dtype=torch.int8)
    for tile in (SplitTile(64, 64, 1, 4), SplitTile(64, 64, 2, 4), SplitTile(192, 64, 2, 8), SplitTile(64, 224, 1, 8)):
        given = values, torch.rand(ROWS, 1), pack(randn(out, width), SCHEMES["int8"]), None, torch.bfloat16
        yield f"split_product {tile}", partial(split_product, *given, tile)
    experts, ends = pack(randn(3, out, width), SCHEMES["int4"]), torch.tensor([0, 33, ROWS], dtype=torch.int32)
    yield "packed grouped_product", partial(grouped_product, randn(ROWS, width), experts, ends)
    in_8_bits = {"x_scales": torch.rand(ROWS, 1), "dtype": torch.bfloat16}
    rounded = values, pack(randn(3, out, width), SCHEMES["int8"]), ends
    yield "grouped_product in 8 bits", partial(grouped_product, *rounded, **in_8_bits)
    for name in ("fp8", "int8"):
        gate_up, down = pack(randn(5, 2 * out, width), SCHEMES[name]), pack(randn(5, width, out), SCHEMES[name])
        given = randn(1, width), torch.rand(1, 3), torch.tensor([[4, -1, 0]]), gate_up, down
        yield f"by_choices {name}", partial(by_choices, ExpertsCall(*given))
    pruned = randn(out, width)
    pruned.view(out, -1, 4)[..., 1:3] = 0
    yield "expand", partial(expand_on_device, pack(pruned, SPARSITIES["2:4"]))


def _rounding(width: int) -> Iterator[tuple[str, Callable[[], object]]]:
    odd = width + 40
    for columns in (0, 128):
        yield _own(round_rows, randn(ROWS, width), "e4m3", columns)
        yield _own(silu_mul_round, randn(ROWS, odd), randn(ROWS, odd), "int8", columns)
        for keeps in (False, True):
            yield _own(add_rms_norm_round, randn(ROWS, odd), randn(ROWS, odd), randn(odd), EPS, "e4m3", columns, keeps)


def _own(operation: Operation, *args: Any) -> tuple[str, Callable[[], object]]:
    """Its Triton implementation."""
    (made,) = (one for one in operation.implementations if one.name == "triton")
    return f"{operation.name} {args[-3:]}", partial(made.run, *args)
