"""Attention of packed sequences with gradients, by libraries: cuDNN, or PyTorch's FlashAttention-2 (Dao 2023)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from strata.kernels.attention.spec import AttentionCall


def _library() -> tuple[Callable[..., Any], dict[str, bool]] | None:
    """PyTorch's kernel for packed sequences and what it wants to be told of grouped heads; None if it has no window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    accepted = inspect.signature(varlen_attn).parameters
    if "window_size" not in accepted or "scale" not in accepted:
        return None
    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in accepted else {}


# The import loads torch.compile, most of a second that a machine without a GPU need not wait.
_LIBRARY = _library() if torch.cuda.is_available() else None
# cuDNN builds a graph for each new shape, 27 ms: only lengths that recur go there.
DENSE_MULTIPLE = 512


def supports(call: AttentionCall) -> bool:
    q = call.q
    return (
        _LIBRARY is not None
        and call.sinks is None
        and call.batch.pages is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] % 8 == 0
        and q.shape[2] <= 256
    )


def flash(call: AttentionCall) -> Tensor:
    """Differentiable. The library counts a window without the query's own position; -1 means none."""
    assert _LIBRARY is not None
    q, k, v, batch, spec, _ = call
    run, grouped = _LIBRARY
    offsets, longest = batch.offsets, batch.longest
    left = -1 if spec.window is None else spec.window - 1
    out: Tensor = run(q, k, v, offsets, offsets, longest, longest, scale=spec.scale, window_size=(left, 0), **grouped)
    return out


def dense_supports(call: AttentionCall) -> bool:
    """Sequences of one length that fill the batch; as many tokens as that cannot be divided otherwise.

    cuDNN's backward pass adds queries' gradients up in no fixed order, so deterministic runs go without it.
    """
    q, batch, spec = call.q, call.batch, call.spec
    longest = batch.longest
    return (
        batch.pages is None
        and call.sinks is None
        and (spec.window is None or spec.window >= longest)
        and (batch.offsets.shape[0] - 1) * longest == q.shape[0] > 0
        and longest % DENSE_MULTIPLE == 0
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] % 8 == 0
        and q.shape[2] <= 128
        and not torch.are_deterministic_algorithms_enabled()
    )


def dense(call: AttentionCall) -> Tensor:
    """cuDNN over [sequences, heads, longest, head_dim]. Differentiable."""
    batched = (x.unflatten(0, (-1, call.batch.longest)).transpose(1, 2) for x in (call.q, call.k, call.v))
    out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batched, None, True, 0.0, True, False, scale=call.spec.scale
    )[0]
    return out.transpose(1, 2).flatten(0, 1)


def whole_sequences(call: AttentionCall) -> Tensor:
    """Sequences that stand whole in the batch, one library call each. Differentiable, on any device."""
    q, k, v, batch, spec, sinks = call
    offsets, scale, window = batch.offsets, spec.scale, spec.window
    if torch.compiler.is_compiling():  # a compiled graph has no number of calls that depends on what tensors hold
        return _masked(q, k, v, offsets, scale, window, sinks)
    parts = []
    for first, last in pairwise(offsets.tolist()):
        if first == last:
            continue
        mask = None if window is None or window >= last - first else _band(last - first, window, q.device)
        query, key, value = (x[first:last].transpose(0, 1)[None] for x in (q, k, v))
        if sinks is None:
            out = sdpa(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        else:
            out = _with_sinks(query, key, value, _band(last - first, window or last - first, q.device), scale, sinks)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts) if parts else q.new_empty(q.shape)


def _masked(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """The same in one call over all tokens, with a mask [tokens, tokens] that keeps sequences apart."""
    at = torch.arange(q.shape[0], device=q.device, dtype=offsets.dtype)
    sequence = torch.searchsorted(offsets, at, right=True)
    visible = (sequence[:, None] == sequence) & (at[:, None] >= at)
    if window is not None:
        visible &= at > at[:, None] - window
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    if sinks is not None:
        return _with_sinks(query, key, value, visible, scale, sinks)[0].transpose(0, 1)
    return sdpa(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """q: [1, heads, queries, head_dim], visible: [queries, keys]. A sink is the score of one more key, of zeros, whose
    value is zero; its gradient is that of the mask, for which the library holds all scores."""
    bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)
    of_sinks = sinks.to(q.dtype)[:, None, None].expand(-1, len(visible), 1)
    bias = torch.cat((bias.expand(len(sinks), -1, -1), of_sinks), -1)
    k, v = (torch.cat((x, torch.zeros_like(x[:, :, :1])), 2) for x in (k, v))
    return sdpa(q, k, v, attn_mask=bias[None], scale=scale, enable_gqa=True)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)
