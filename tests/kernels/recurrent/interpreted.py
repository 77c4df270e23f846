"""The Triton kernels of recurrent operations in Triton's interpreter: how far each is from its reference, as JSON.

Sequences begin, go on, stand still and pad; results and rows are poisoned before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation import sigmoid_gate
from strata.kernels.recurrent import (
    deinterleave,
    gated_delta,
    gated_delta_triton,
    gated_norm,
    short_convolution,
    state_space,
    state_space_triton,
)
from strata.kernels.recurrent.calls import GatedDeltaCall, StateSpaceCall, StateSpaceSpec
from strata.kernels.rotary import rope as rope_file
from strata.kernels.rotary.rope import rope_angles
from strata.kernels.state.fixed import FixedStates
from strata.models.batch import Batch
from tests.kernels.interpreter import prepare_interpreter
from tests.kernels.recurrent.steps import step

LENGTHS, STARTS, SLOTS, ROWS = [5, 1, 0, 19, 1], [0, 3, 2, 7, 0], [4, 1, 3, 0, 2], 6


def batch_of(*shapes: tuple[int, ...]) -> Batch:
    """The same numbers in each call, and NaN in rows of sequences that begin, and of none."""
    generator = torch.Generator().manual_seed(5)
    tensors = tuple(torch.randn(ROWS, *shape, generator=generator) for shape in shapes)
    for one in tensors:
        one[[SLOTS[0], SLOTS[4], 5]] = torch.nan
    return step(LENGTHS, STARTS, FixedStates((tensors,), torch.tensor(SLOTS, dtype=torch.int32)))


def compare(reference: Callable[..., Tensor], kernel: Callable[..., Tensor], *shapes: tuple[int, ...]) -> float:
    """The largest difference of results, and of all that is kept; and of whole sequences, of which nothing is."""
    worst = 0.0
    kept = [batch_of(*shapes), batch_of(*shapes)]
    whole = step([3, 17])
    for batches in (kept, [whole, whole]):
        wanted, found = reference(batches[0]), kernel(batches[1])
        assert found.isfinite().all()
        worst = max(worst, (wanted - found).abs().max().item())
    assert kept[0].states is not None
    assert kept[1].states is not None
    for wanted, found in zip(kept[0].states.tensors[0], kept[1].states.tensors[0], strict=True):
        assert torch.equal(wanted.isnan(), found.isnan())
        worst = max(worst, (wanted - found).nan_to_num().abs().max().item())
    return worst


def convolution(width: int, bias: bool, silu: bool) -> float:
    def run(operation: Callable[..., Tensor]) -> Callable[[Batch], Tensor]:
        def on(batch: Batch) -> Tensor:
            torch.manual_seed(1)
            x = torch.randn(len(batch.tokens), 29)[:, 3:24]
            weight, shift = torch.randn(21, 1, width), torch.randn(21)
            return operation(x, weight, shift if bias else None, batch, 0, silu)

        return on

    return compare(run(short_convolution.short_convolution.reference), run(short_convolution._triton), (21, width - 1))


def scan(heads: int, dim: int, groups: int, size: int, chunks: bool) -> float:
    spec = StateSpaceSpec(0, 0.01, math.inf)

    def run(operation: Callable[..., Tensor]) -> Callable[[Batch], Tensor]:
        def on(batch: Batch) -> Tensor:
            torch.manual_seed(1)
            tokens = len(batch.tokens)
            joined = torch.randn(tokens, heads * dim + 2 * groups * size + 3)
            x, b, c, _ = joined.split([heads * dim, groups * size, groups * size, 3], 1)
            b, c = (one.unflatten(1, (groups, size)) for one in (b, c))
            given = (x.unflatten(1, (heads, dim)), torch.randn(tokens, heads), b, c)
            return operation(*given, torch.randn(heads), torch.randn(heads), torch.randn(heads), batch, spec)

        return on

    def kernel(*args: Any) -> Tensor:
        call = StateSpaceCall(*args)
        assert state_space_triton.supports(call)
        return state_space_triton.launch(call, chunks=chunks)

    return compare(run(state_space.state_space.reference), run(kernel), (1,), (heads, dim, size))


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int, chunks: bool) -> float:
    def run(operation: Callable[..., Tensor]) -> Callable[[Batch], Tensor]:
        def on(batch: Batch) -> Tensor:
            torch.manual_seed(1)
            tokens = len(batch.tokens)
            sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
            q, k, v = torch.randn(tokens, sum(sizes)).split(sizes, 1)
            q, k = (one.unflatten(1, (key_heads, key_dim)) for one in (q, k + 1))
            gates = torch.randn(tokens, 2 * heads).split(heads, 1)
            given = (q, k, v.unflatten(1, (heads, value_dim)), *gates)
            return operation(*given, torch.randn(heads) - 2, torch.randn(heads), batch, 0)

        return on

    def kernel(*args: Any) -> Tensor:
        call = GatedDeltaCall(*args)
        assert gated_delta_triton.supports(call)
        return gated_delta_triton.launch(call, chunks=chunks)

    return compare(run(gated_delta.gated_delta.reference), run(kernel), (1,), (heads, key_dim, value_dim))


def norm(gate_first: bool, heads: bool) -> float:
    torch.manual_seed(1)
    gate = torch.randn(7, 51)[:, :48]
    x, size = torch.randn(7, 48), 12
    if heads:
        x, gate = x.view(7, 4, 12), gate.unflatten(1, (4, 12))
    given = (x, gate, torch.randn(x.shape[-1]), 1e-5, size, gate_first)
    assert gated_norm._fits(*given)
    return (gated_norm._triton(*given) - gated_norm.gated_rms_norm.reference(*given)).abs().max().item()


def columns(groups: int, *parts: int) -> float:
    torch.manual_seed(1)
    x = torch.randn(7, groups * sum(parts) + 3)[:, 2:-1].unflatten(1, (groups, -1))
    assert deinterleave._fits(x, parts)
    return (deinterleave._triton(x, parts) - deinterleave.deinterleave.reference(x, parts)).abs().max().item()


def gates(*shape: int, shared: bool = False) -> float:
    """Gates, or one for a row, as parts of a wider product; NaN beside them."""
    torch.manual_seed(1)
    x, wide = torch.randn(shape), torch.full((*shape[:-1], 3 * shape[-1]), torch.nan)
    gate = wide[..., 1 : 2 if shared else 1 + shape[-1]].normal_()
    assert sigmoid_gate._fits(x, gate)
    return (sigmoid_gate._triton(x, gate) - sigmoid_gate.sigmoid_gate.reference(x, gate)).abs().max().item()


def rotation(heads: int, dims: int, kept: int) -> float:
    """Of heads that stand beside something else."""
    torch.manual_seed(1)
    x = torch.randn(7, heads, 2 * (dims + kept))[..., : dims + kept]
    given = x, *rope_angles.reference(torch.arange(7, 0, -1, dtype=torch.int32), torch.randn(9, dims))
    assert rope_file._fits(*given)
    return (rope_file._triton(*given) - rope_file.partial_rope.reference(*given)).abs().max().item()


def main() -> None:
    prepare_interpreter()
    torch.set_deterministic_debug_mode("warn")  # what is only allocated holds NaN
    state_space_triton._CHUNK = 16  # so that few tokens are two chunks
    found = {
        "convolution 4": convolution(4, True, True),
        "convolution 2": convolution(2, False, False),
        "recurrence": scan(2, 5, 2, 7, False),
        "recurrence of wide heads": scan(1, 20, 1, 128, False),
        "chunks": scan(4, 5, 2, 7, True),
        "chunks of wide heads": scan(1, 40, 1, 128, True),
        "delta": delta(1, 2, 7, 5, False),
        "delta in chunks of wide heads": delta(1, 1, 100, 40, True),
        "norm behind the gate": norm(True, False),
        "norm before the gate": norm(False, False),
        "norms of heads": norm(False, True),
        "columns": columns(3, 5, 5, 12, 1),
        "columns of gates": columns(4, 3, 3),
        "rotation of a part": rotation(3, 6, 10),
        "rotation of most": rotation(5, 12, 2),
        "gates of heads": gates(5, 3, 20),
        "a gate of a row": gates(5, 1100, shared=True),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
