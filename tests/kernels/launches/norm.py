"""Norms of whole rows, and embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from strata.kernels.linear.embedding import embedding, vocabulary_embedding
from strata.kernels.norm import norm_grad
from strata.kernels.norm.norm import launch_norm
from tests.kernels.compiled_for import CompileCase

from .noted import EPS, empty, ints, noted

ROWS = 1000
ROUNDINGS = (("int8", 0, None), ("e4m3", 0, None), ("e4m3", 0, 0.01), ("e4m3", 128, None))


def norm(name: str, width: int, **more: Any) -> list[CompileCase]:
    return noted(f"{name} of {width}", partial(launch_norm, empty(ROWS, width), empty(width), EPS, **more))


def compile_cases() -> Iterator[CompileCase]:
    for width in (128, 4096, 16384):
        rows = empty(ROWS, width)
        yield from norm("rows", width)
        yield from norm("sum", width, residual=rows)
        yield from norm("sum with what is received", width, residual=rows, received=rows)
        yield from norm("wide", width, offset=1.0)
        if width > 128:
            for rounding in ROUNDINGS:
                yield from norm(f"sum to {rounding}", width, residual=rows, rounding=rounding)
            yield from norm("rows to int8", width, rounding=ROUNDINGS[0], keeps=False)
            yield from norm("wide to int8", width, rounding=ROUNDINGS[0], keeps=False, offset=1.0)
    for width in (64, 2048, 8192):
        rows = empty(ROWS, width)
        yield from noted(f"of {width}", partial(norm_grad._backward, rows, rows, rows, empty(width), EPS))
    heads = partial(launch_norm, empty(ROWS, 48, 128)[:, :32], empty(128), EPS)
    yield from noted("of heads", heads)
    for width in (1024, 4096):
        yield from noted(f"of {width}", partial(embedding.bind("cuda"), ints(ROWS), empty(32000, width)))
        part = partial(vocabulary_embedding.bind("cuda"), ints(ROWS), empty(32000, width), 32000)
        yield from noted(f"of a part, {width}", part)
