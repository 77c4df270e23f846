"""A small kernel, compiled for Hopper as its first launch would."""

from __future__ import annotations

from typing import Any

from strata.kernels.triton_import import jit, tl, triton


@jit
def doubled_kernel(x, count, BLOCK: tl.constexpr, SCALES: tl.constexpr):  # type: ignore[no-untyped-def]
    at = x + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, SCALES[0] * tl.load(at, mask=tl.arange(0, BLOCK) < count))


def compile_doubled() -> tuple[Any, bool]:
    """The kernel, and whether it lay on the disk."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {"x": "*fp32", "count": "i32", "BLOCK": "constexpr", "SCALES": "constexpr"}
    constants = {"BLOCK": 64, "SCALES": (2.0, 3.0)}
    source = ASTSource(doubled_kernel, kinds, constants, {(0,): [["tt.divisibility", 16]]})
    hits: list[bool] = []
    before = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    try:
        return triton.compile(source, target=GPUTarget("cuda", 90, 32)), hits == [True]
    finally:
        triton.knobs.compilation.listener = before
