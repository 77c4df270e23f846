"""Activations, rounding to 8 bits, and packed weights that become floats."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from strata.kernels.activation.quantized_silu_mul import silu_mul_round
from strata.kernels.activation.sigmoid_gate import sigmoid_gate
from strata.kernels.activation.silu_mul import gelu_mul, silu_mul
from strata.kernels.activation.silu_mul_grad import silu_mul_gradients
from strata.kernels.quant.dequantize import dequantize
from strata.kernels.quant.expand import expand_on_device
from strata.kernels.quant.fp8 import quantize
from strata.kernels.quant.quantized import QuantizedWeight, pack
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES, SPARSITIES
from tests.kernels.compiled_for import CompileCase

from .noted import empty, noted


def compile_cases() -> Iterator[CompileCase]:
    rows = empty(5, 4096)
    for operation in (silu_mul, gelu_mul):
        yield from noted("of rows", partial(operation.bind("cuda"), rows, rows))
    yield from noted("of rows", partial(silu_mul_gradients, rows, rows, rows))
    gate = sigmoid_gate.bind("cuda")
    yield from noted("of heads", partial(gate, empty(5, 16, 256), empty(5, 16, 256)))
    yield from noted("of a shared expert", partial(gate, empty(5, 2048), empty(5, 1)))
    for rounding in (("int8", 0, None), ("e4m3", 0, None), ("e4m3", 0, 0.01), ("e4m3", 128, None)):
        for width in (14336, 28672):
            x, name = empty(5, width), f"of {width} to {rounding}"
            yield from noted(name, partial(round_rows.bind("cuda"), x, *rounding))
            if width == 14336:
                yield from noted(name, partial(silu_mul_round.bind("cuda"), x, x, *rounding))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for per_row in (False, True):
            name = f"to {dtype} by {'rows' if per_row else 'the whole'}"
            yield from noted(name, partial(quantize.bind("cuda"), empty(100, 4096), dtype, per_row))
    packed = pack(empty(4096, 2048), SCHEMES["int4"])
    zeros = empty(*packed.scales.shape, dtype=torch.uint8)
    yield from noted("int4 to bf16", partial(dequantize, packed._replace(zeros=zeros), torch.bfloat16))
    (scheme,) = SPARSITIES.values()
    sparse = QuantizedWeight.of(scheme, empty(4096, 1024), empty(4096, 256, dtype=torch.uint8))
    yield from noted("2:4 to bf16", partial(expand_on_device, sparse))
