"""A causal convolution over the last few tokens, each channel on its own, as recurrent layers have before their state.

Mamba (Gu and Dao 2023, section 3.4) has it with a width of 4; so have Mamba-2 and gated delta networks.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.recurrent.sequences import (
    TAIL,
    RecurrentBatch,
    first_states,
    keep_states,
    spans,
    state_cost,
)
from strata.kernels.triton_import import jit, tl

WIDTHS = (2, 3, 4)


def _cost(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool, *, workload: Workload
) -> Cost:
    # A multiply-add for each weight, the first an addition to the bias; silu is negation, exponential, sum, quotient.
    each = 2 * weight.shape[-1] - (bias is None) + 4 * silu
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    found = Cost(each * x.numel(), x.nbytes + weights, x.numel() * x.element_size(), weights)
    return found if batch.states is None else found + state_cost(batch.states.tensors[layer][TAIL], workload)


def _meta(x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool) -> Tensor:
    return x.new_empty(x.shape, device="meta")


@operation(_cost, meta=_meta, mutates=("batch",), reads_state=True, recurrent=True)
def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool
) -> Tensor:
    """`y[t, c] = bias[c] + sum_j weight[c, 0, j] * x[t - width + 1 + j, c]` in each sequence, then silu of it if asked.

    x: [tokens, channels]; weight: [channels, 1, width], width 2 to 4, and bias: [channels] or None, of the same dtype.
    What stands before a sequence's first token of the batch is the tail that it has kept, `batch.states.tensors[layer]
    [0]` of shape [rows, channels, width - 1], and zeros before position 0. In the end its row there holds its last
    width - 1 inputs. Returns [tokens, channels] in x's dtype, computed in float32 (float64 for float64) and rounded
    once. Without `batch.states` all sequences begin here and nothing is kept.
    """
    precision = torch.promote_types(x.dtype, torch.float32)
    reach = weight.shape[-1] - 1
    tails = first_states(batch, layer, TAIL, (x.shape[1], reach), x)
    parts, last = [x.new_empty(0, x.shape[1])], []
    for tail, (first, end) in zip(tails, spans(batch), strict=True):
        inputs = torch.cat((tail, x[first:end].T), 1)
        last.append(inputs[:, inputs.shape[1] - reach :])
        if end > first:
            wide = None if bias is None else bias.to(precision)
            found = F.conv1d(inputs[None].to(precision), weight.to(precision), wide, groups=len(weight))[0].T
            parts.append((F.silu(found) if silu else found).to(x.dtype))
    keep_states(batch, layer, TAIL, torch.stack(last))
    return torch.cat(parts)


def _taps(x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int) -> Tensor:
    """The convolution [tokens, channels] before silu, in float32 or float64, of all sequences at once."""
    tokens, channels = x.shape
    width = weight.shape[-1]
    reach, sequences = width - 1, batch.offsets.shape[0] - 1
    precision = torch.promote_types(x.dtype, torch.float32)
    tails = first_states(batch, layer, TAIL, (channels, reach), x)
    inputs = torch.cat((x, tails.transpose(1, 2).reshape(-1, channels)))  # tokens, then the tails, oldest first
    ends = batch.offsets[1:].long()
    token = torch.arange(tokens, device=x.device)
    sequence = torch.searchsorted(ends, token, right=True)
    starts = batch.offsets[:-1].long()
    own = starts[sequence]

    def source(at: Tensor, of: Tensor, start: Tensor) -> Tensor:
        """Where the input at row `at` of sequence `of` stands in `inputs`: behind its start, or in its tail."""
        return torch.where(at >= start, at, tokens + (of + 1) * reach + at - start)

    taps = weight[:, 0].to(precision)
    found = None if bias is None else bias.to(precision).expand(tokens, channels)
    for tap in range(width):
        moved = inputs.index_select(0, source(token - reach + tap, sequence, own)).to(precision) * taps[:, tap]
        found = moved if found is None else found + moved
    if batch.states is not None:
        lag = torch.arange(-reach, 0, device=x.device)
        at = source(ends[:, None] + lag, torch.arange(sequences, device=x.device)[:, None], starts[:, None])
        last = inputs.index_select(0, at.flatten()).view(sequences, reach, channels)
        keep_states(batch, layer, TAIL, last.transpose(1, 2))
    assert found is not None
    return found


def _torch(x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool) -> Tensor:
    found = _taps(x, weight, bias, batch, layer)
    return (F.silu(found) if silu else found).to(x.dtype)


@short_convolution.implement("blocks", "cpu", invariant=True)
def _blocks(x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool) -> Tensor:
    """No product is fused with a sum, and each element is on its own, so its bits do not depend on others."""
    found = _taps(x, weight, bias, batch, layer)
    return (in_whole_vectors(found, partial(F.silu, inplace=True)) if silu else found).to(x.dtype)


short_convolution.implement("torch", "cpu", differentiable=True)(_torch)


@jit
def _input(x, tails, at, start, is_new, slot, column, held, channels, token_stride, REACH: tl.constexpr):
    """The input of row `at` of a sequence that starts at row `start`: of the step, of its tail, or zero."""
    inside = at >= start
    value = tl.load(x + at * token_stride + column, mask=held & inside, other=0.0).to(tl.float32)
    kept = tails + (slot * channels + column) * REACH + (REACH + at - start)
    before = tl.load(kept, mask=held & (at < start) & (is_new == 0), other=0.0).to(tl.float32)
    return tl.where(inside, value, before)


@partial(jit, unspecialized=("offsets", "positions", "slots"))
def short_convolution_kernel(
    x,
    weight,
    bias,
    tails,
    slots,
    offsets,
    positions,
    result,
    channels,
    token_stride,
    WIDTH: tl.constexpr,
    KEEPS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [sequences, longest / TOKENS, channels / BLOCK]: TOKENS tokens of a sequence, one after another.

    The tail is read by the first of a sequence's programs alone, and written by `tail_kernel` afterwards.
    """
    sequence = tl.program_id(0)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    first = start + tl.program_id(1) * TOKENS
    if first < end:
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        held = column < channels
        is_new = 1
        slot = start * 0
        if KEEPS:
            is_new = (tl.load(positions + start) == 0).to(tl.int32)
            slot = tl.load(slots + sequence).to(tl.int64)
        begins = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            begins = tl.load(bias + column, mask=held, other=0.0).to(tl.float32)
        for at in range(first, tl.minimum(first + TOKENS, end)):
            total = begins
            for tap in tl.static_range(WIDTH):
                factor = tl.load(weight + column * WIDTH + tap, mask=held, other=0.0).to(tl.float32)
                source = at - (WIDTH - 1) + tap
                total += factor * _input(
                    x, tails, source, start, is_new, slot, column, held, channels, token_stride, WIDTH - 1
                )
            if SILU:
                total = total / (1 + tl.exp(-total))
            tl.store(result + at * channels + column, total.to(result.dtype.element_ty), mask=held)


@partial(jit, unspecialized=("offsets", "positions", "slots"))
def tail_kernel(x, tails, slots, offsets, positions, channels, token_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Programs [sequences, channels / BLOCK]: the last WIDTH - 1 inputs of a sequence into its row."""
    sequence = tl.program_id(0)
    start = tl.load(offsets + sequence).to(tl.int64)
    end = tl.load(offsets + sequence + 1).to(tl.int64)
    if end > start:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        held = column < channels
        is_new = (tl.load(positions + start) == 0).to(tl.int32)
        slot = tl.load(slots + sequence).to(tl.int64)
        # From the oldest on: what is written is not read by the next, which stands behind it in the same tail.
        for place in tl.static_range(WIDTH - 1):
            source = end - (WIDTH - 1) + place
            value = _input(x, tails, source, start, is_new, slot, column, held, channels, token_stride, WIDTH - 1)
            target = tails + (slot * channels + column) * (WIDTH - 1) + place
            tl.store(target, value.to(tails.dtype.element_ty), mask=held)


_TILE = {"TOKENS": 16, "BLOCK": 256}
_WARPS = 4


def _triton(x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool) -> Tensor:
    tokens, channels = x.shape
    result = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    sequences = batch.offsets.shape[0] - 1
    if not result.numel():
        return result
    keeps = batch.states is not None
    tails, slots = (batch.states.tensors[layer][TAIL], batch.states.slots) if batch.states is not None else (x, x)
    width, blocks = weight.shape[-1], ceil_div(channels, _TILE["BLOCK"])
    short_convolution_kernel[(sequences, ceil_div(batch.longest, _TILE["TOKENS"]), blocks)](
        *(x, weight, bias, tails, slots, batch.offsets, batch.positions, result, channels, x.stride(0)),
        WIDTH=width,
        KEEPS=keeps,
        SILU=silu,
        **_TILE,
        num_warps=_WARPS,
    )
    if keeps:
        given = x, tails, slots, batch.offsets, batch.positions, channels, x.stride(0)
        tail_kernel[(sequences, blocks)](*given, WIDTH=width, BLOCK=_TILE["BLOCK"], num_warps=_WARPS)
    return result


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool) -> bool:
    return x.dtype != torch.float64 and x.stride(1) == 1 and weight.shape[-1] in WIDTHS


def _kernels(
    x: Tensor, weight: Tensor, bias: Tensor | None, batch: RecurrentBatch, layer: int, silu: bool
) -> tuple[object, ...]:
    return (short_convolution_kernel,) if batch.states is None else (short_convolution_kernel, tail_kernel)


short_convolution.in_triton(_triton, invariant=True, supports=_fits, kernels=_kernels)
short_convolution.implement("torch", "cuda", differentiable=True)(_torch)
