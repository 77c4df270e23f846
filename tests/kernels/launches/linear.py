"""Products: in tiles of a fixed shape, of few rows by plain and packed weights, in 8 bits, and gated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from strata.kernels.linear import batch_invariant, linear, silu_mul
from strata.kernels.linear.quantized.split_product import SplitTile, split_product, split_product_kernel
from strata.kernels.linear.quantized.w8a8_kernel import w8a8_kernel
from strata.kernels.linear.quantized_linear import QuantizedCall, by_tiles
from strata.kernels.linear.silu_mul import linear_silu_mul_kernel
from strata.kernels.linear.small_m import Inboxes, SmallMProduct, launch
from strata.kernels.linear.small_m_kernels import dot_kernel, gemv_kernel
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, pack
from tests.kernels.compiled_for import CompileCase

from .noted import BF16, EPS, FP32, empty, ints, noted

OUT, WIDTH = 6144, 4096
COPIED = ("wgmma.mma_async", "cp.async.bulk.tensor")
GEMV = {gemv_kernel: ("ld.global.L1::evict_first", "v4.b32", "griddepcontrol.wait")}
BY_BYTES = {gemv_kernel: ("ld.global.L1::evict_first", "v4.b32", "cvt.rn.f16x2.e4m3x2")}
ONE_ROW_BY_INT4 = {gemv_kernel: ("ld.global.L1::evict_first.L2::cache_hint.v2.b32", "ld.global.v4.b32", "dp4a.u32.s32")}


def packed(kind: str, rows: int = 1, columns: int = 0, out: int = OUT, width: int = WIDTH) -> QuantizedWeight:
    """A weight [out, width] without memory, in values of a kind of which so many rows and columns share a scale."""
    small = torch.eye(8).repeat(16, 16)[:, :128] if kind == "2:4" else torch.ones(128, 128)
    found = pack(small.bfloat16() if kind == "2:4" else small, Scheme(kind, rows, columns))
    scales = (-(-out // (rows or out)), -(-width // (columns or width)))
    if kind == "2:4":
        scales = out, width // 8
    values = out, found.values.shape[1] * width // 128
    tensors = {"values": empty(*values, dtype=found.values.dtype), "scales": empty(*scales, dtype=found.scales.dtype)}
    return found.with_tensors(tensors)


def batch_invariant_tiles() -> Iterator[CompileCase]:
    tiles = [
        (tile, BF16)
        for tile in (
            batch_invariant._NARROW,
            batch_invariant._SHORT,
            batch_invariant._SMALL,
            batch_invariant._MIDDLE,
            batch_invariant._LARGE,
        )
    ]
    for slices, some in (
        (1, [*tiles, (batch_invariant._SINGLE, FP32)]),
        (linear.MAX_SLICES, [(linear._FEW, BF16), (linear._MANY, BF16), (linear._SINGLE, FP32)]),
    ):
        for tile, dtype in some:
            x, weight = (empty(rows, WIDTH, dtype=dtype) for rows in (1000, OUT))
            result = dtype if slices == 1 else FP32
            must = {batch_invariant.linear_kernel: ("wgmma.mma_async",) if dtype == BF16 else ("fma.rn.f32",)}
            kind = "bf16" if dtype == BF16 else "fp32"
            name = f"{kind} {tile.rows}x{tile.columns}x{tile.width}" + f", {slices} slices" * (slices > 1)
            yield from noted(name, partial(batch_invariant.launch_linear, x, weight, None, result, slices, tile), must)


def few(name: str, rows: int, tile: SmallMTile, must: Any, weight: Any = None, **more: Any) -> list[CompileCase]:
    weight = empty(OUT, WIDTH) if weight is None else weight
    product = SmallMProduct(empty(rows, weight.shape[1]), weight, **more)
    title = f"{name} {rows}x{tile.columns}x{tile.width}/{tile.splits}"
    return noted(title, lambda: launch(product, tile).run(), must)


def few_rows() -> Iterator[CompileCase]:
    """Each tile with each end that a product may have."""
    for columns, block, warps, rows in ((4, 4096, 8, 1), (4, 2048, 4, 1), (4, 2048, 4, 4)):
        for name, more in ends(rows):
            yield from few(name, rows, SmallMTile("gemv", columns, block, warps, early=True), GEMV, **more)
    for columns, block, warps, stages, rows, splits, product in (
        (16, 256, 2, 4, 8, 1, "mma.sync"),
        (64, 128, 4, 4, 16, 8, "wgmma.mma_async"),
        (64, 128, 4, 4, 64, 4, "wgmma.mma_async"),
        (128, 128, 8, 4, 16, 1, "wgmma.mma_async"),
        (128, 64, 8, 5, 128, 1, "wgmma.mma_async"),
        (64, 64, 8, 4, 256, 2, "wgmma.mma_async"),
    ):
        tile = SmallMTile("dot", columns, block, warps, stages, splits, early=True, prefetch=512, rows=rows)
        must = product, "cp.async.cg.shared.global", "cp.async.bulk.prefetch.L2", *["atom"] * (splits > 1)
        for name, more in ends(rows):
            # Few rows are sent, by programs that have all of a column's sum.
            if name != "sent" or (splits == 1 and rows <= 16):
                count = rows if rows < 64 else rows - 1
                yield from few(name, count, tile, {dot_kernel: must}, **more)


def ends(rows: int) -> list[tuple[str, dict[str, Any]]]:
    scale = {"squares": empty(rows, 64, dtype=FP32), "eps": EPS}
    inboxes = Inboxes(empty(2, dtype=torch.int64), ints(rows), 0, starts_receiver=True)
    return [
        ("plain", {}),
        ("scaled", scale),
        ("gated", scale | {"gated": True}),
        ("added", {"residual": empty(rows, OUT), "norm_weight": empty(OUT)}),
        ("sent", {"inboxes": inboxes}),
    ]


def few_rows_by_packed_weights() -> Iterator[CompileCase]:
    gemv = SmallMTile("gemv", 4, 2048, 8, early=True)
    yield from few("e4m3", 2, gemv, BY_BYTES, packed("e4m3"), gated=True)
    for kind, group, rows, columns, block, warps, splits, must in (
        ("int4", 128, 8, 32, 256, 2, 4, ("mma.sync", "lop3.b32", "cp.async.cg.shared.global")),
        ("e2m1", 32, 8, 32, 128, 2, 4, ("mma.sync", "cp.async.cg.shared.global")),
        ("e4m3", 128, 64, 64, 128, 4, 1, ("wgmma.mma_async", "cp.async.cg.shared.global")),
        ("2:4", 0, 8, 32, 128, 2, 4, ("mma.sync", "cp.async.cg.shared.global")),
        ("2:4", 0, 64, 64, 128, 4, 1, ("wgmma.mma_async",)),
    ):
        tile = SmallMTile("dot", columns, block, warps, 4, splits, True, 512, rows)
        yield from few(kind, rows - 1, tile, {dot_kernel: must}, packed(kind, 1, group), gated=True)
    small = packed("int4", 1, 128)
    narrow = {name: small.scales.to(torch.float8_e4m3fn) for name in ("scales", "zeros")}
    for columns, block, warps, width, more in (
        (8, 4096, 2, 4096, {}),
        (16, 4096, 4, 4096, {"zeros": small.scales.to(torch.uint8)}),
        (4, 16384, 4, 16384, {}),
        (8, 1024, 1, 1024, {}),
        (8, 4096, 2, 4096, narrow | {"row_scales": empty(OUT, 1, dtype=FP32)}),
    ):
        weight = packed("int4", 1, 128, width=width)._replace(**more)
        tile = SmallMTile("gemv", columns, block, warps, early=True)
        yield from few(f"int4 {sorted(more)}", 1, tile, ONE_ROW_BY_INT4, weight, gated=True)


def split_case(kind: str, tile: SplitTile) -> CompileCase:
    """kind: e4m3 or int8."""
    weight = packed(kind, width=4 * WIDTH)
    values, scales = empty(1000, 4 * WIDTH, dtype=weight.values.dtype), empty(1000, 1, dtype=FP32)
    product = "s32.s8.s8" if kind == "int8" else "f32.e4m3.e4m3"
    title = f"of {kind} {tile.rows}x{tile.columns} by {tile.splits}"
    run = partial(split_product, values, scales, weight, None, BF16, tile)
    (case,) = noted(title, run, {split_product_kernel: (*COPIED, product)})
    return case


def rounded(kind: str, group: int) -> list[CompileCase]:
    weight = packed(kind, group or 1, group)._replace(activations="block" if group else "row")
    scales = empty(8192, WIDTH // group if group else 1, dtype=FP32)
    call = QuantizedCall(empty(8192, WIDTH, dtype=weight.values.dtype), scales, weight, None, BF16)
    product = "s32.s8.s8" if kind == "int8" else "f32.e4m3.e4m3"
    return noted(f"of {kind} by {group}", partial(by_tiles, call), {w8a8_kernel: (*COPIED, product)})


def compile_cases() -> Iterator[CompileCase]:
    yield from batch_invariant_tiles()
    yield from few_rows()
    yield from few_rows_by_packed_weights()
    for kind, tile in (
        ("e4m3", SplitTile(128, 128, 4, 8)),
        ("e4m3", SplitTile(192, 256, 1, 8)),
        ("int8", SplitTile(64, 128, 2, 4)),
        ("int8", SplitTile(256, 128, 4, 8)),
        ("int8", SplitTile(128, 224, 1, 8)),
    ):
        yield split_case(kind, tile)
    for kind, group in (("int8", 0), ("e4m3", 128)):
        yield from rounded(kind, group)
    for bias in (None, empty(2 * OUT)):
        run = partial(silu_mul._triton, empty(8192, WIDTH), empty(2 * OUT, WIDTH), bias)
        yield from noted("with bias" if bias is not None else "without", run, {linear_silu_mul_kernel: COPIED})
