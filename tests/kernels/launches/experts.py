"""Experts of mixtures, their routing, their order, and sums of what they make."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.moe import combine, count
from strata.kernels.moe.calls import BiasedExpertsCall, ExpertsCall
from strata.kernels.moe.grouped import grouped_product
from strata.kernels.moe.grouped_kernels import grouped_kernel, quantized_grouped_kernel
from strata.kernels.moe.local_order import sort_choices
from strata.kernels.moe.route import SOFTMAX, ExpertChoice, in_one_launch, route_kernel
from strata.kernels.moe.small_m import by_choices, choice_gate_kernel, choice_sum_kernel
from strata.kernels.quant.quantized import QuantizedWeight, pack
from strata.kernels.quant.schemes import SCHEMES
from tests.kernels.compiled_for import CompileCase

from .noted import BF16, FP16, FP32, empty, ints, noted

CLAMP = Clamp(1.702, 7.0)
COPIED = "cp.async.cg.shared.global"
VECTORS = ("ld.global.v4.b32", "st.global.v4.b32")


def longs(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def products(
    name: str, x: Tensor, weight: Tensor | QuantizedWeight, must: tuple[str, ...], biased: bool = False, **more: Any
) -> Iterator[CompileCase]:
    """The product that fetches rows and gates, and the one that does neither."""
    gated = {"source": longs(len(x)), "per_token": 4, "gated": True}
    gated |= {"bias": empty(32, 256), "clamp": CLAMP} if biased else {}
    kernels = {grouped_kernel: must, quantized_grouped_kernel: must}
    for title, given in ((f"with a gate, {name}", gated), (name, {})):
        yield from noted(title, partial(grouped_product, x, weight, ints(32), **given, **more), kernels)


def all_products() -> Iterator[CompileCase]:
    """Of floats every tile; of packed weights bytes by rows, four-bit floats with biases, of a width that no step
    divides, integers with zeros, and blocks; of rows in 8 bits by rows and by blocks."""
    for name, dtype, each, width, must in (
        *(("bf16", BF16, each, 2880, "mma") for each in (1, 20, 40, 200)),
        ("bf16", BF16, 1, 2044, "mma"),
        ("fp16", FP16, 1, 2880, "mma"),
        ("fp32", FP32, 1, 2880, "fma.rn.f32"),
    ):
        x, weight = empty(each * 32, width, dtype=dtype), empty(32, 256, width, dtype=dtype)
        yield from products(f"{name} of {width}, {each} rows an expert", x, weight, (must,), biased=each == 1)
    for scheme, each, width, wanted in (
        ("fp8", 4, 2048, ("mma.sync", "ld.shared.v4.b32", COPIED)),
        ("mxfp4", 20, 2880, ("mma.sync", COPIED)),
        ("int4", 4, 2048, ("mma.sync", "lop3.b32", COPIED)),
        ("fp8_block", 40, 2048, ("wgmma.mma_async", COPIED)),
    ):
        packed = pack(empty(32, 256, width), SCHEMES[scheme])
        if scheme == "int4":
            packed = packed._replace(zeros=empty(*packed.scales.shape, dtype=torch.uint8))
        x = empty(each * 32, width)
        yield from products(f"{scheme}, {each} rows an expert", x, packed, wanted, biased=scheme == "mxfp4")
    for scheme, each, kinds in (
        ("fp8", 4, "f32.e4m3.e4m3"),
        ("int8", 200, "s32.s8.s8"),
        ("fp8_block", 200, "f32.e4m3.e4m3"),
    ):
        packed = pack(empty(32, 256, 2048), SCHEMES[scheme])
        x = empty(each * 32, 2048, dtype=packed.values.dtype)
        in_8_bits = {"x_scales": empty(each * 32, packed.scales.shape[2], dtype=FP32), "dtype": BF16}
        wanted = ("wgmma.mma_async", kinds, COPIED)
        yield from products(f"{scheme} in 8 bits, {each} rows an expert", x, packed, wanted, **in_8_bits)


def choices() -> Iterator[CompileCase]:
    """Of a token alone: of 30B-A3B, of gpt-oss-20b, and of sizes that no block divides."""
    waits = ("griddepcontrol.wait",)
    for name, experts, per_token, hidden, width, dtype in (
        ("30B-A3B", 128, 8, 2048, 768, BF16),
        ("gpt-oss", 32, 4, 2880, 2880, BF16),
        ("odd sizes", 8, 6, 100, 100, FP32),
    ):
        must = waits if dtype == FP32 else (*waits, "evict_first.L2::cache_hint.v4.b32")
        plain = [empty(experts, *size, dtype=dtype) for size in ((2 * width, hidden), (hidden, width))]
        for scheme in ("", "fp8", "int8") if dtype == BF16 else ("",):
            both: list[Any] = [pack(one, SCHEMES[scheme]) for one in plain] if scheme else plain
            given = [empty(1, hidden, dtype=dtype), empty(1, per_token, dtype=FP32), longs(1, per_token), *both]
            call: Any = ExpertsCall(*given)
            if name == "gpt-oss":
                call = BiasedExpertsCall(*given, empty(experts, 2 * width), empty(experts, hidden), CLAMP)
            kernels = {choice_gate_kernel: must, choice_sum_kernel: must}
            yield from noted(f"{name} {scheme or dtype}", partial(by_choices, call), kernels)


def orders() -> Iterator[CompileCase]:
    for tokens, counting in ((16, False), (4000, True)):
        chosen, table, mapping = longs(tokens, 8), ints(128, 6), ints(tokens)
        for name, held, tables in (
            ("all", 512, (None, None)),
            ("placed", 6, (table, None)),
            ("padded", 6, (None, mapping)),
            ("placed and padded", 6, (table, mapping)),
        ):
            sort = partial(sort_choices, chosen, 0, held, *tables, counting=counting)
            yield from noted(f"{name} of {tokens} tokens", sort)


def sums() -> Iterator[CompileCase]:
    weights, kernels = empty(5, 8, dtype=FP32), (combine.combine_kernel, combine.combine_backward_kernel)
    must = dict.fromkeys(kernels, VECTORS)
    for rows in (30, 40):
        given = empty(rows, 2048), longs(5, 8)
        for name, factors in (("weighted", weights), ("plain", None)):
            sums = partial(combine.weighted_sums, *given, factors, full=rows == 40)
            yield from noted(f"{name} of {rows} rows", sums, must)
        yield from noted(f"of {rows} rows", partial(combine.gradients, empty(5, 2048), *given, weights), must)


def routes() -> Iterator[CompileCase]:
    for name, logits, bias, per_token, normalized, choice in (
        ("softmax of 128 experts", empty(3, 128), None, 8, True, SOFTMAX),
        ("softmax of 6 groups of 10 experts", empty(3, 60, dtype=FP16), None, 6, False, ExpertChoice("softmax", 6, 3)),
        (
            "sigmoids of 8 groups of 32 experts",
            empty(3, 256, dtype=FP32),
            empty(256, dtype=FP32),
            8,
            True,
            ExpertChoice("sigmoid", 8, 4, "top2"),
        ),
        ("softmax of 1,024 experts", empty(3, 1024), empty(1024, dtype=FP32), 16, True, SOFTMAX),
    ):
        launch = partial(in_one_launch, logits, bias, per_token, normalized, choice)
        yield from noted(name, launch, {route_kernel: ("redux.sync",)})
    counted = partial(count.count_choices.bind("cuda"), longs(3, 8), ints(3), longs(2, 128), 1)
    yield from noted("of a step", counted)


def compile_cases() -> Iterator[CompileCase]:
    yield from all_products()
    yield from choices()
    yield from orders()
    yield from sums()
    yield from routes()
