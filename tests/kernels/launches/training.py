"""The loss and the optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from strata.kernels.loss.loss import cross_entropy_gradients
from strata.kernels.optimizer.adamw import Constants, adamw, adamw_kernel
from strata.kernels.optimizer.muon import muon_momentum, muon_momentum_kernel, muon_update, muon_update_kernel
from tests.kernels.compiled_for import CompileCase

from .noted import BF16, FP32, empty, noted

# Four elements a thread, in one load each.
VECTORS = dict.fromkeys(
    (adamw_kernel, muon_momentum_kernel, muon_update_kernel), ("ld.global.v4.b32", "st.global.v4.b32")
)


def compile_cases() -> Iterator[CompileCase]:
    shape = (1024, 1024)
    # Other memory than the masters.
    weight, wide = empty(2, *shape)[1], [empty(*shape, dtype=FP32) for _ in range(3)]
    step = empty(4, dtype=FP32)
    moments = partial(adamw.bind("cuda"), weight, *wide, weight, step, Constants(0.9, 0.95, 1e-8, 0.1))
    yield from noted("of masters", moments, VECTORS)
    momentum = partial(muon_momentum.bind("cuda"), weight, wide[0], wide[1], step, 0.95)
    yield from noted("of masters", momentum, VECTORS)
    yield from noted("of masters", partial(muon_update.bind("cuda"), weight, wide[0], weight, step, 0.2, 0.1), VECTORS)
    targets, scale = empty(100, dtype=torch.int64), empty(dtype=FP32)
    loss = partial(cross_entropy_gradients.bind("cuda"), empty(100, 256, dtype=BF16), empty(32000, 256), targets, scale)
    yield from noted("of 32000 ids", partial(loss, 1 << 30))
