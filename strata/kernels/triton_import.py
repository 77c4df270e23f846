"""Triton where it is installed. Elsewhere the kernels' files still import and register nothing for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata.kernels.cached_launch import HOLDS, CachedKernel
from strata.kernels.compiling.cache_key import OrderlessKernel

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    from strata.kernels.compiling.disk_cache import use_checked_cache

    use_checked_cache()
    HAS_TRITON = True
except ImportError:
    triton = tl = libdevice = gdc_launch_dependents = gdc_wait = TensorDescriptor = None
    HAS_TRITON = False


def constant(value: Any) -> Any:
    """A number, or a text such as assembly, that kernels may read as a constant."""
    return tl.constexpr(value) if HAS_TRITON else value


def jit(kernel: Callable[..., Any], *, unspecialized: tuple[str, ...] = ()) -> Any:
    """`triton.jit` with quicker launches, or the function untouched where there is no Triton.

    A kernel is compiled anew for integers that are 1 or multiples of 16 and for addresses that are multiples of 16, and
    may then divide a row among its threads in another way. Invariant kernels leave `unspecialized` what varies from
    batch to batch.
    """
    if not HAS_TRITON:
        return kernel
    if triton.knobs.runtime.interpret:
        return triton.jit(kernel, do_not_specialize=unspecialized)
    if HOLDS:
        return CachedKernel(kernel, unspecialized)
    return OrderlessKernel(kernel, do_not_specialize=unspecialized)


__all__ = [
    "HAS_TRITON",
    "TensorDescriptor",
    "constant",
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "libdevice",
    "tl",
    "triton",
]
