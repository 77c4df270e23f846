"""Experts of a token alone, in two launches: nothing has to be sorted.

The first multiplies a token by gate and up of one of its experts a program, the second adds up what all of a token's
experts make of that. Both stream weights past the CUDA cores, which keeps more of them coming than tiles of one row do.
Weights of 8 bits with scales of rows become float32 in registers; scales multiply sums, and x is not rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall, biases_of, clamp_of
from strata.kernels.moe.grouped import NO_CLAMP, reads
from strata.kernels.moe.grouped_kernels import gated_by
from strata.kernels.quant.dequantize import E4M3_CAPABILITY, unpack_wide, wide_scale
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@partial(jit, unspecialized=("per_token",))
def choice_gate_kernel(
    x,
    gate_up,
    scales,
    bias,
    chosen,
    inner,
    out,
    width,
    x_stride,
    per_token,
    alpha,
    limit,
    KIND: tl.constexpr,
    CLAMPED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [choices * (out / BLOCK_N)]: columns of what one expert makes of one token. scales [experts, 2 * out] of
    values of a KIND in 8 bits; bias likewise; or None."""
    ASSEMBLY: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    columns = tl.cdiv(out, BLOCK_N)
    choice = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    held = column < out
    k = tl.arange(0, BLOCK_K)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen + choice).to(tl.int64)
    if expert < 0:
        return
    beside = tl.cast(out, tl.int64) * width  # from a row of the gate to that of up
    weight = gate_up + expert * 2 * beside + tl.minimum(column, out - 1).to(tl.int64)[:, None] * width + k[None, :]
    row = x + tl.cast(choice // per_token, tl.int64) * x_stride + k
    if scales is not None:
        # Asked for long before they are wanted.
        scales += expert * 2 * out + column
        gate_scale = tl.load(scales, mask=held, other=0.0)
        up_scale = tl.load(scales + out, mask=held, other=0.0)
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for at in range(0, width, BLOCK_K):
        if WHOLE_K:
            of_gate = tl.load(weight + at, eviction_policy="evict_first")
            of_up = tl.load(weight + beside + at, eviction_policy="evict_first")
            value = tl.load(row + at)
        else:
            there = k < width - at
            of_gate = tl.load(weight + at, mask=there[None, :], other=0.0, eviction_policy="evict_first")
            of_up = tl.load(weight + beside + at, mask=there[None, :], other=0.0, eviction_policy="evict_first")
            value = tl.load(row + at, mask=there, other=0.0)
        value = value.to(tl.float32)[None, :]
        gate += unpack_wide(of_gate, KIND, ASSEMBLY) * value
        up += unpack_wide(of_up, KIND, ASSEMBLY) * value
    opening = tl.sum(gate, 1)
    if scales is not None:
        opening *= wide_scale(gate_scale)
    opened = tl.sum(up, 1)
    if scales is not None:
        opened *= wide_scale(up_scale)
    if bias is not None:
        bias += expert * 2 * out + column
        opening += tl.load(bias, mask=held, other=0.0).to(tl.float32)
        opened += tl.load(bias + out, mask=held, other=0.0).to(tl.float32)
    opened = gated_by(opened, opening, alpha, limit, CLAMPED)
    target = inner + tl.cast(choice, tl.int64) * out + column
    tl.store(target, opened.to(inner.dtype.element_ty), mask=held)


@jit
def choice_sum_kernel(
    inner,
    down,
    scales,
    bias,
    weights,
    chosen,
    result,
    hidden,
    width,
    KIND: tl.constexpr,
    K: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EARLY: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [tokens * (hidden / BLOCK_N)]: columns of a token's sum. SLOTS: a power of two, at least the K experts
    of a token, whose rows of down are read side by side. scales, bias [experts, hidden], weights: or None."""
    ASSEMBLY: tl.constexpr = inner.dtype.element_ty == tl.bfloat16
    columns = tl.cdiv(hidden, BLOCK_N)
    token = tl.program_id(0) // columns
    first = tl.program_id(0) % columns * BLOCK_N
    row = tl.arange(0, BLOCK_N * SLOTS)
    slot, column = row % SLOTS, first + row // SLOTS
    k = tl.arange(0, BLOCK_K)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    choice = tl.cast(token, tl.int64) * K + slot
    expert = tl.load(chosen + choice, mask=slot < K, other=-1).to(tl.int64)
    there = (expert >= 0) & (column < hidden)
    place = tl.maximum(expert, 0) * hidden + tl.minimum(column, hidden - 1)
    if scales is not None:
        scale = tl.load(scales + place, mask=there, other=0.0)
    matrix = down + place * width
    total = tl.zeros((BLOCK_N * SLOTS, BLOCK_K), dtype=tl.float32)
    for at in range(0, width, BLOCK_K):
        held = there[:, None] if WHOLE_K else there[:, None] & (k < width - at)[None, :]
        of_down = tl.load(matrix[:, None] + at + k[None, :], mask=held, other=0.0, eviction_policy="evict_first")
        value = tl.load(inner + choice[:, None] * width + at + k[None, :], mask=held, other=0.0)
        total += unpack_wide(of_down, KIND, ASSEMBLY) * value.to(tl.float32)
    product = tl.sum(total, 1)
    if scales is not None:
        product *= wide_scale(scale)
    if bias is not None:
        product += tl.load(bias + place, mask=there, other=0.0).to(tl.float32)
    if weights is not None:
        product *= tl.load(weights + choice, mask=there, other=0.0)
    product = tl.sum(tl.reshape(product, (BLOCK_N, SLOTS)), 1)
    column = first + tl.arange(0, BLOCK_N)
    target = result + tl.cast(token, tl.int64) * hidden + column
    tl.store(target, product.to(result.dtype.element_ty), mask=column < hidden)


class ChoiceTile(NamedTuple):
    """What a program of either launch makes at a time: columns of the result, by `width` columns of the weight."""

    columns: int
    width: int
    warps: int


# Of gate and up, and of down. Of 8 bits as many bytes of a row, and of gate and up half as many rows: registers of four
# programs a processor, whose loads under way are as many bytes as two of eight rows have.
FLOAT_TILES = ChoiceTile(8, 512, 4), ChoiceTile(2, 128, 4)
QUANTIZED_TILES = ChoiceTile(4, 1024, 4), ChoiceTile(2, 256, 4)


def streams(x: Tensor, weight: Tensor | QuantizedWeight) -> bool:
    """Whether the kernels read a weight of all experts, of tokens like x."""
    if isinstance(weight, Tensor):
        return reads(x, weight)
    alone = weight.zeros is None and weight.row_scales is None and weight.order is None
    return (
        alone
        and weight.kind in ("e4m3", "int8")
        and weight.scales.shape[1:] == (weight.shape[1], 1)
        and weight.values.is_contiguous()
        and weight.scales.is_contiguous()
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and (weight.kind != "e4m3" or DeviceLimits.of(weight.device).capability >= E4M3_CAPABILITY)
    )


def by_choices(
    call: ExpertsCall[Any] | BiasedExpertsCall[Any], tiles: tuple[ChoiceTile, ChoiceTile] | None = None
) -> Tensor:
    """As `experts`, or `biased_experts`, with weights that the kernels read (`streams`).

    All contiguous, but for rows of x whose elements are side by side; weights float32. tiles: None for those of the
    rule.
    """
    x, weights, chosen, gate_up, down = call[:5]
    (tokens, per_token), (_, hidden, width) = chosen.shape, down.shape
    inner = torch.empty((tokens * per_token, width), dtype=x.dtype, device=x.device)
    result = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not result.numel():
        return result
    (first, last), clamp, early = biases_of(call), clamp_of(call), DeviceLimits.of(x.device).capability >= (9, 0)
    alpha, limit = map(float, clamp or NO_CLAMP)
    of_gate, of_sum = tiles or (FLOAT_TILES if isinstance(down, Tensor) else QUANTIZED_TILES)
    matrices, known = _stored(gate_up, hidden, of_gate, early)
    tensors: tuple[Tensor | None, ...] = (x, *matrices, first, chosen, inner)
    grid = (tokens * per_token * ceil_div(width, of_gate.columns),)
    sizes = (width, hidden, x.stride(0), per_token)
    choice_gate_kernel[grid](*tensors, *sizes, alpha, limit, CLAMPED=clamp is not None, **known)
    matrices, known = _stored(down, width, of_sum, early)
    tensors = (inner, *matrices, last, weights, chosen, result)
    grid = (tokens * ceil_div(hidden, of_sum.columns),)
    choice_sum_kernel[grid](*tensors, hidden, width, K=per_token, SLOTS=next_power_of_2(per_token), **known)
    return result


def _stored(
    weight: Tensor | QuantizedWeight, width: int, part: ChoiceTile, early: bool
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Any]]:
    """Values and scales of a weight, and what a launch that reads it is compiled for."""
    known = {"WHOLE_K": width % part.width == 0, "BLOCK_N": part.columns, "BLOCK_K": part.width, "EARLY": early}
    known |= {"num_warps": part.warps, "launch_pdl": early}
    if isinstance(weight, Tensor):
        return (weight, None), known | {"KIND": ""}
    return (weight.values, weight.scales), known | {"KIND": weight.kind}


CHOICE_KERNELS: tuple[Any, ...] = (choice_gate_kernel, choice_sum_kernel)
