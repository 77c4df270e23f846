"""Experts of a token alone, in two launches: nothing has to be sorted.

The first multiplies a token by gate and up of one of its experts a program, the second adds up what all of a token's
experts make of that. Both stream weights past the CUDA cores, which keeps more of them coming than tiles of one row do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.grouped import NO_CLAMP
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@partial(jit, unspecialized=("per_token",))
def choice_gate_kernel(
    x,
    gate_up,
    bias,
    chosen,
    inner,
    out,
    width,
    x_stride,
    per_token,
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [choices * (out / BLOCK_N)]: columns of what one expert makes of one token."""
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
        gate += of_gate.to(tl.float32) * value
        up += of_up.to(tl.float32) * value
    opening, opened = tl.sum(gate, 1), tl.sum(up, 1)
    if BIASED:
        bias += expert * 2 * out + column
        opening += tl.load(bias, mask=held, other=0.0).to(tl.float32)
        opened += tl.load(bias + out, mask=held, other=0.0).to(tl.float32)
    if CLAMPED:
        # By comparisons, which let NaN through.
        opening = tl.where(opening > limit, limit, opening)
        opened = tl.where(opened > limit, limit, tl.where(opened < -limit, -limit, opened))
        opened = (opened + 1) * opening / (1 + tl.exp(-alpha * opening))
    else:
        opened *= opening / (1 + tl.exp(-opening))
    target = inner + tl.cast(choice, tl.int64) * out + column
    tl.store(target, opened.to(inner.dtype.element_ty), mask=held)


@jit
def choice_sum_kernel(
    inner,
    down,
    bias,
    weights,
    chosen,
    result,
    hidden,
    width,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EARLY: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [tokens * (hidden / BLOCK_N)]: columns of a token's sum. SLOTS: a power of two, at least the K experts
    of a token, whose rows of down are read side by side."""
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
    matrix = down + (tl.maximum(expert, 0) * hidden + tl.minimum(column, hidden - 1)) * width
    total = tl.zeros((BLOCK_N * SLOTS, BLOCK_K), dtype=tl.float32)
    for at in range(0, width, BLOCK_K):
        held = there[:, None] if WHOLE_K else there[:, None] & (k < width - at)[None, :]
        of_down = tl.load(matrix[:, None] + at + k[None, :], mask=held, other=0.0, eviction_policy="evict_first")
        value = tl.load(inner + choice[:, None] * width + at + k[None, :], mask=held, other=0.0)
        total += of_down.to(tl.float32) * value.to(tl.float32)
    product = tl.sum(total, 1)
    if BIASED:
        product += tl.load(bias + tl.maximum(expert, 0) * hidden + column, mask=there, other=0.0).to(tl.float32)
    if WEIGHTED:
        product *= tl.load(weights + choice, mask=there, other=0.0)
    product = tl.sum(tl.reshape(product, (BLOCK_N, SLOTS)), 1)
    column = first + tl.arange(0, BLOCK_N)
    target = result + tl.cast(token, tl.int64) * hidden + column
    tl.store(target, product.to(result.dtype.element_ty), mask=column < hidden)


# Columns, elements of k that a program holds at a time, and warps.
_GATE, _SUM = (8, 512, 4), (2, 128, 4)


def by_choices(call: ExpertsCall[Tensor] | BiasedExpertsCall[Tensor]) -> Tensor:
    """As `experts`, or `biased_experts`.

    All contiguous, but for rows of x whose elements are side by side; weights float32.
    """
    x, weights, chosen, gate_up, down = call[:5]
    (tokens, per_token), (_, hidden, width) = chosen.shape, down.shape
    inner = torch.empty((tokens * per_token, width), dtype=x.dtype, device=x.device)
    result = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    early = DeviceLimits.of(x.device).capability >= (9, 0)
    clamp, (first, last) = call.bounds, call.biases
    alpha, limit = clamp or NO_CLAMP
    columns, block, warps = _GATE
    if not result.numel():
        return result
    choice_gate_kernel[(tokens * per_token * ceil_div(width, columns),)](
        x,
        gate_up,
        gate_up if first is None else first,
        chosen,
        inner,
        width,
        hidden,
        x.stride(0),
        per_token,
        float(alpha),
        float(limit),
        CLAMPED=clamp is not None,
        BIASED=first is not None,
        WHOLE_K=hidden % block == 0,
        EARLY=early,
        BLOCK_N=columns,
        BLOCK_K=block,
        num_warps=warps,
        launch_pdl=early,
    )
    columns, block, warps = _SUM
    choice_sum_kernel[(tokens * ceil_div(hidden, columns),)](
        inner,
        down,
        down if last is None else last,
        down if weights is None else weights,
        chosen,
        result,
        hidden,
        width,
        K=per_token,
        WEIGHTED=weights is not None,
        BIASED=last is not None,
        WHOLE_K=width % block == 0,
        EARLY=early,
        SLOTS=next_power_of_2(per_token),
        BLOCK_N=columns,
        BLOCK_K=block,
        num_warps=warps,
        launch_pdl=early,
    )
    return result


CHOICE_KERNELS: tuple[Any, ...] = (choice_gate_kernel, choice_sum_kernel)


def compile_cases() -> list[CompileCase]:
    cases = []
    for kind, size, clamped in (("bf16", 2048, False), ("bf16", 2880, True), ("fp32", 100, False)):
        by_16 = "i32" if size % 16 else "i32:16"
        floats = dict.fromkeys(("x", "gate_up", "bias", "inner", "down", "result"), f"*{kind}:16")
        signature = floats | {"chosen": "*i64:16", "weights": "*fp32:16", "per_token": "i32"}
        signature |= dict.fromkeys(("out", "width", "hidden", "x_stride"), by_16) | {"alpha": "fp32", "limit": "fp32"}
        for kernel, (columns, block, warps), more in (
            (choice_gate_kernel, _GATE, {"CLAMPED": clamped}),
            (choice_sum_kernel, _SUM, {"K": 6, "SLOTS": 8, "WEIGHTED": True}),
        ):
            constants = {"BIASED": clamped, "WHOLE_K": size % block == 0, "EARLY": True} | more
            constants |= {"BLOCK_N": columns, "BLOCK_K": block}
            names = set(kernel.arg_names) - set(constants)
            own = {name: one for name, one in signature.items() if name in names}
            name = f"{kernel.__name__} {kind} of {size}{' in bounds' if clamped else ''}"
            must = (
                ("griddepcontrol.wait",)
                if size == 100
                else ("griddepcontrol.wait", "evict_first.L2::cache_hint.v4.b32")
            )
            cases.append(CompileCase(name, kernel, own, constants, warps, 2, must))
    return cases
