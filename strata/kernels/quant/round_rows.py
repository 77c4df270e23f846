"""Rows of activations in 8 bits, for products with weights in 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.op import operation
from strata.kernels.quant.packed import LARGEST, Scheme, pack_values, rounded, scales_of_rows
from strata.kernels.triton_import import HAS_TRITON, jit, tl

DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}


def _cost(x: Tensor, kind: str, columns: int, *, workload: Workload) -> Cost:
    groups = x.shape[0] * (-(-x.shape[1] // columns) if columns else 1)
    # The largest magnitude, a division, and the rounding.
    return Cost(3 * x.numel(), x.nbytes, x.numel() + 4 * groups)


def _meta(x: Tensor, kind: str, columns: int) -> tuple[Tensor, Tensor]:
    groups = -(-x.shape[1] // columns) if columns else 1
    values = x.new_empty(x.shape, dtype=DTYPES[kind], device="meta")
    return values, x.new_empty((x.shape[0], groups), dtype=torch.float32, device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def round_rows(x: Tensor, kind: str, columns: int) -> tuple[Tensor, Tensor]:
    """x [rows, width] in 8 bits -> values [rows, width], float8_e4m3fn ("e4m3") or int8 ("int8"), and their scales.

    scales: float32 [rows, groups]. So many columns share one, the last of a row maybe fewer; 0: all of a row.

    The largest magnitude that a scale serves becomes the largest value.
    """
    groups = Scheme(kind, 1, columns)
    scales = scales_of_rows(x.float(), groups)
    spread = scales if scales.shape[1] == 1 else scales.repeat_interleave(columns, 1)[:, : x.shape[1]]
    return pack_values(rounded(x.float() / spread, kind), kind), scales


@jit
def round_rows_kernel(
    x,
    values,
    scales,
    width,
    x_stride,
    groups,
    KIND: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [rows], which read a row twice unless GROUP columns share a scale. BLOCK: a multiple of GROUP.

    Divisions are rounded as the reference rounds them: a value half way between two others must go the same way.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    if GROUP == 0:
        top = tl.zeros((BLOCK,), dtype=tl.float32)
        poison = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            given = tl.load(x + row * x_stride + start + column, mask=start + column < width, other=0.0).to(tl.float32)
            top = tl.maximum(top, tl.abs(given))
            poison += given * 0.0
        # What is no finite number shows in the whole row, and a run sees it: integers have no NaN.
        scale = tl.div_rn(tl.maximum(tl.max(top), LEAST), MOST) + tl.sum(poison)
        tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        held = start + column < width
        given = tl.load(x + row * x_stride + start + column, mask=held, other=0.0).to(tl.float32)
        if GROUP == 0:
            scaled = tl.div_rn(given, scale)
        else:
            grouped = tl.reshape(given, (BLOCK // GROUP, GROUP))
            own = tl.div_rn(tl.maximum(tl.max(tl.abs(grouped), 1), LEAST), MOST) + tl.sum(grouped * 0.0, 1)
            group = start // GROUP + tl.arange(0, BLOCK // GROUP)
            tl.store(scales + row * groups + group, own, mask=group < groups)
            scaled = tl.reshape(tl.div_rn(grouped, own[:, None]), (BLOCK,))
        scaled = tl.clamp(scaled, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
        if KIND == "int8":
            # The sum has no bits below 1: to the nearest, ties to even.
            scaled = (scaled + 12582912.0) - 12582912.0
        tl.store(values + row * width + start + column, scaled.to(values.dtype.element_ty), mask=held)


_BLOCK, _WARPS = 4096, 4


def _block(width: int, columns: int) -> int:
    return min(_BLOCK, next_power_of_2(max(width, columns, 128)))


def _triton(x: Tensor, kind: str, columns: int) -> tuple[Tensor, Tensor]:
    (rows, width), groups = x.shape, -(-x.shape[1] // columns) if columns else 1
    values = torch.empty((rows, width), dtype=DTYPES[kind], device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        round_rows_kernel[(rows,)](
            x,
            values,
            scales,
            width,
            x.stride(0),
            groups,
            KIND=kind,
            MOST=LARGEST[kind],
            LEAST=torch.finfo(torch.float32).tiny,
            GROUP=columns,
            BLOCK=_block(width, columns),
            num_warps=_WARPS,
        )
    return values, scales


def _fits(x: Tensor, kind: str, columns: int) -> bool:
    power_of_2 = columns & (columns - 1) == 0
    return kind in DTYPES and power_of_2 and columns <= _BLOCK and x.stride(1) == 1 and x.shape[1] > 0


if HAS_TRITON:
    round_rows.implement("triton", "cuda", invariant=True, supports=_fits, kernels=(round_rows_kernel,))(_triton)


def compile_cases() -> list[CompileCase]:
    signature = {"x": "*bf16:16", "scales": "*fp32:16"} | dict.fromkeys(("width", "x_stride"), "i32:16")
    cases = []
    for kind, stored, group in (("int8", "i8", 0), ("e4m3", "fp8e4nv", 128)):
        constants = {"KIND": kind, "MOST": LARGEST[kind], "LEAST": 2.0**-126, "GROUP": group, "BLOCK": _BLOCK}
        given = signature | {"values": f"*{stored}:16", "groups": "i32"}
        cases.append(CompileCase(f"rows to {kind} by {group}", round_rows_kernel, given, constants, _WARPS, 2))
    return cases
