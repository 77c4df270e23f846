"""Recurrent layers: convolutions, state spaces, delta rules, and the norms behind them."""

from __future__ import annotations

import math
from functools import partial

from strata.kernels.recurrent import delta_chunks_cuda, gated_delta_triton, state_space_triton
from strata.kernels.recurrent.deinterleave import deinterleave
from strata.kernels.recurrent.delta_chunks_cuda import KERNELS
from strata.kernels.recurrent.gated_norm import gated_rms_norm
from strata.kernels.recurrent.sequences import GatedDeltaCall, StateSpaceCall, StateSpaceSpec
from strata.kernels.recurrent.short_convolution import short_convolution
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch
from tests.kernels.compiled_for import CompileCase

from .noted import EPS, FP32, empty, ints, noted

TOKENS, SEQUENCES = 1000, 3


def batch_of(*shape: int) -> Batch:
    """Of three sequences, with states of the recurrence of this shape."""
    states = RecurrentStates(((empty(8, 4096, 3), empty(8, *shape, dtype=FP32)),), ints(SEQUENCES))
    return Batch(ints(TOKENS), ints(TOKENS), ints(SEQUENCES + 1), 400, states=states)


def compile_cases() -> list[CompileCase]:
    """As Qwen3-Next has them, 16 key heads for 32 heads of 128 by 128, and Mamba-2, heads of 64 with a state of 128."""
    q, k, v, gate = (empty(TOKENS, heads, 128) for heads in (16, 16, 32, 32))
    a, b = empty(TOKENS, 32), empty(TOKENS, 32)
    delta = GatedDeltaCall(q, k, v, a, b, empty(32), empty(32), batch_of(32, 128, 128), 0)
    x, dt, keys = empty(TOKENS, 256, 64), empty(TOKENS, 256), empty(TOKENS, 16, 128)
    own = empty(256), empty(256), empty(256)
    space = StateSpaceCall(x, dt, keys, keys, *own, batch_of(256, 64, 128), StateSpaceSpec(0, 0.0, math.inf))
    norm, columns = gated_rms_norm.bind("cuda"), deinterleave.bind("cuda")
    convolve = partial(short_convolution.bind("cuda"), empty(TOKENS, 4096), empty(4096, 1, 4), empty(4096))
    launches = [
        noted("of chunks", lambda: delta_chunks_cuda.launch(delta), dict.fromkeys(KERNELS, ("wgmma",))),
        noted("of tokens", lambda: gated_delta_triton.launch(delta, chunks=False)),
        noted(
            "of prompts",
            lambda: gated_delta_triton.launch(delta, chunks=True),
            {gated_delta_triton.gated_delta_chunks_kernel: ("mma",)},
        ),
        noted("of tokens", lambda: state_space_triton.launch(space, chunks=False)),
        noted(
            "of prompts",
            lambda: state_space_triton.launch(space, chunks=True),
            {state_space_triton.state_space_chunks_kernel: ("mma",)},
        ),
        noted("with states", lambda: convolve(batch_of(1), 0, True)),
        noted("of heads", lambda: norm(v, gate, empty(128), EPS, 128, False)),
        *(
            noted(f"of {size}", lambda size=size: norm(*(empty(8, 16 * size),) * 2, empty(16 * size), EPS, size, True))
            for size in (1024, 8192)
        ),
        # Of a merged product, in which gates stand behind the others.
        noted("of products", lambda: columns(empty(TOKENS, 16, 768), (128, 128, 256, 256))),
        noted("of gates", lambda: columns(empty(TOKENS, 64).unflatten(1, (16, 4)), (2, 2))),
    ]
    return [case for one in launches for case in one]
