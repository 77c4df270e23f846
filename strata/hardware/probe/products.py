"""Products as a library computes them, by dtype: operands [rows, width] and weight [out, width], both random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]


def operands(dtype: str, rows: int, out: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [rows, width] and weight [out, width]. Random: what is multiplied decides how much power a product takes."""
    return _random(dtype, rows, width, device), _random(dtype, out, width, device)


def product(dtype: str, device: torch.device) -> Product:
    """x @ weight.T for operands of that dtype: "float8" is e4m3 with one scale a tensor, "tf32" float32 tensors."""
    if dtype == "float8":
        one = torch.ones((), device=device)
        return lambda x, weight: torch._scaled_mm(
            x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if dtype == "int8":
        return lambda x, weight: torch._int_mm(x, weight.t())
    return lambda x, weight: torch.mm(x, weight.t())


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Inside, products of float32 tensors on a GPU are in tf32 if that is the dtype, else in float32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _random(dtype: str, rows: int, columns: int, device: torch.device) -> Tensor:
    if dtype == "int8":
        return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=device)
    if dtype == "float8":
        return torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn)
    return torch.randn(rows, columns, dtype=torch.float32 if dtype == "tf32" else getattr(torch, dtype), device=device)
