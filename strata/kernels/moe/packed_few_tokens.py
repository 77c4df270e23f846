"""Experts of a token alone with packed weights of 8 bits and scales of rows: as `few_tokens`, in two launches.

Values stream past the CUDA cores and become float32 in registers; scales multiply sums. x is not rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.compile_case import CompileCase
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.grouped import NO_CLAMP, gated_by
from strata.kernels.quant.dequantize import E4M3_CAPABILITY, unpack_wide, wide_scale
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@partial(jit, unspecialized=("per_token",))
def packed_choice_gate_kernel(
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
    """Programs as those of `choice_gate_kernel`. scales [experts, 2 * out]; bias likewise, or None."""
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
    opening = tl.sum(gate, 1) * wide_scale(gate_scale)
    opened = tl.sum(up, 1) * wide_scale(up_scale)
    if bias is not None:
        bias += expert * 2 * out + column
        opening += tl.load(bias, mask=held, other=0.0).to(tl.float32)
        opened += tl.load(bias + out, mask=held, other=0.0).to(tl.float32)
    opened = gated_by(opened, opening, alpha, limit, CLAMPED)
    target = inner + tl.cast(choice, tl.int64) * out + column
    tl.store(target, opened.to(inner.dtype.element_ty), mask=held)


@jit
def packed_choice_sum_kernel(
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
    """Programs as those of `choice_sum_kernel`. scales [experts, hidden]; bias likewise, or None; so may weights be."""
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
    scale = tl.load(scales + place, mask=there, other=0.0)
    total = tl.zeros((BLOCK_N * SLOTS, BLOCK_K), dtype=tl.float32)
    for at in range(0, width, BLOCK_K):
        held = there[:, None] if WHOLE_K else there[:, None] & (k < width - at)[None, :]
        tile = down + place[:, None] * width + at + k[None, :]
        of_down = tl.load(tile, mask=held, other=0.0, eviction_policy="evict_first")
        value = tl.load(inner + choice[:, None] * width + at + k[None, :], mask=held, other=0.0)
        total += unpack_wide(of_down, KIND, ASSEMBLY) * value.to(tl.float32)
    product = tl.sum(total, 1) * wide_scale(scale)
    if bias is not None:
        product += tl.load(bias + place, mask=there, other=0.0).to(tl.float32)
    if weights is not None:
        product *= tl.load(weights + choice, mask=there, other=0.0)
    product = tl.sum(tl.reshape(product, (BLOCK_N, SLOTS)), 1)
    column = first + tl.arange(0, BLOCK_N)
    target = result + tl.cast(token, tl.int64) * hidden + column
    tl.store(target, product.to(result.dtype.element_ty), mask=column < hidden)


class ChoicePart(NamedTuple):
    """What a program of either launch makes at a time: columns of the result, by `width` columns of the weight."""

    columns: int
    width: int
    warps: int


# As many bytes of a row as of 16 bits, and of gate and up half as many rows: registers of four programs a processor,
# whose loads under way are as many bytes as two of eight rows have.
GATE, SUM = ChoicePart(4, 1024, 4), ChoicePart(2, 256, 4)


def _streams(x: Tensor, weight: PackedWeight) -> bool:
    """Whether the kernels read a weight of all experts, of tokens like x."""
    alone = weight.zeros is None and weight.row_scales is None and weight.order is None
    return (
        alone
        and weight.kind in ("e4m3", "int8")
        and weight.scales.shape[1:] == (weight.shape[1], 1)
        and weight.values.is_contiguous()
        and weight.scales.is_contiguous()
        and x.dtype in (torch.bfloat16, torch.float16)
        and (weight.kind != "e4m3" or DeviceLimits.of(weight.device).capability >= E4M3_CAPABILITY)
    )


def packed_choices_take(call: ExpertsCall[PackedWeight] | BiasedExpertsCall[PackedWeight]) -> bool:
    """Whether there are so few tokens that each reads its experts' weights by itself, and these are of 8 bits."""
    x, weights, chosen, gate_up, down = call[:5]
    few = 0 < len(chosen) <= thresholds(x.device).choice_tokens and chosen.is_contiguous() and x.stride(-1) == 1
    wide = weights is None or (weights.dtype == torch.float32 and weights.is_contiguous())
    return few and wide and _streams(x, gate_up) and _streams(x, down)


def by_packed_choices(
    call: ExpertsCall[PackedWeight] | BiasedExpertsCall[PackedWeight],
    parts: tuple[ChoicePart, ChoicePart] = (GATE, SUM),
) -> Tensor:
    """As `by_choices`, with weights that `packed_choices_take`."""
    x, weights, chosen, gate_up, down = call[:5]
    biases, clamp = call.biases, call.bounds
    (tokens, per_token), (_, hidden, width) = chosen.shape, down.shape
    inner = torch.empty((tokens * per_token, width), dtype=x.dtype, device=x.device)
    result = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    early = DeviceLimits.of(x.device).capability >= (9, 0)
    alpha, limit = clamp or NO_CLAMP
    (columns, block, warps), last = parts
    if not result.numel():
        return result
    packed_choice_gate_kernel[(tokens * per_token * ceil_div(width, columns),)](
        x,
        gate_up.values,
        gate_up.scales,
        biases[0],
        chosen,
        inner,
        width,
        hidden,
        x.stride(0),
        per_token,
        float(alpha),
        float(limit),
        KIND=gate_up.kind,
        CLAMPED=clamp is not None,
        WHOLE_K=hidden % block == 0,
        EARLY=early,
        BLOCK_N=columns,
        BLOCK_K=block,
        num_warps=warps,
        launch_pdl=early,
    )
    columns, block, warps = last
    packed_choice_sum_kernel[(tokens * ceil_div(hidden, columns),)](
        inner,
        down.values,
        down.scales,
        biases[1],
        weights,
        chosen,
        result,
        hidden,
        width,
        KIND=down.kind,
        K=per_token,
        WHOLE_K=width % block == 0,
        EARLY=early,
        SLOTS=next_power_of_2(per_token),
        BLOCK_N=columns,
        BLOCK_K=block,
        num_warps=warps,
        launch_pdl=early,
    )
    return result


PACKED_CHOICE_KERNELS: tuple[Any, ...] = (packed_choice_gate_kernel, packed_choice_sum_kernel)


def compile_cases() -> list[CompileCase]:
    """As of 30B-A3B, and with biases and bounds of a width that no block divides."""
    signature = dict.fromkeys(("x", "inner", "result"), "*bf16:16") | {"scales": "*fp32:16", "weights": "*fp32:16"}
    signature |= {"chosen": "*i64:16", "per_token": "i32"}
    signature |= dict.fromkeys(("out", "width", "hidden", "x_stride"), "i32:16") | {"alpha": "fp32", "limit": "fp32"}
    signature |= {"bias": "*bf16:16"}
    cases = []
    for kernel, (columns, block, warps), more in (
        (packed_choice_gate_kernel, GATE, {"KIND": "e4m3", "CLAMPED": False, "WHOLE_K": True, "bias": None}),
        (packed_choice_gate_kernel, GATE, {"KIND": "int8", "CLAMPED": True, "WHOLE_K": False}),
        (packed_choice_sum_kernel, SUM, {"KIND": "int8", "K": 8, "SLOTS": 8, "WHOLE_K": True, "bias": None}),
        (packed_choice_sum_kernel, SUM, {"KIND": "e4m3", "K": 4, "SLOTS": 4, "WHOLE_K": False}),
    ):
        stored = "*i8:16" if more["KIND"] == "int8" else "*fp8e4nv:16"
        constants: dict[str, object] = {"EARLY": True, "BLOCK_N": columns, "BLOCK_K": block} | more
        given = signature | dict.fromkeys(("gate_up", "down"), stored)
        own = {name: one for name, one in given.items() if name in set(kernel.arg_names) - set(constants)}
        must = ("griddepcontrol.wait", "evict_first.L2::cache_hint.v4.b32")
        cases.append(CompileCase(f"{kernel.__name__} {more['KIND']}", kernel, own, constants, warps, 2, must))
    return cases
