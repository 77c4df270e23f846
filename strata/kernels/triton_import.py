"""Triton where it is installed. Elsewhere the kernels' files still import and register nothing for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, or the function untouched where there is no Triton."""
    return triton.jit(kernel) if HAS_TRITON else kernel


if not HAS_TRITON:
    triton = tl = None

__all__ = ["HAS_TRITON", "jit", "tl", "triton"]
