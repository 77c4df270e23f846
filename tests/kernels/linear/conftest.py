"""Fixtures of the dense layer's tests."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest

from strata.kernels.linear import cublaslt as gemm_cublaslt
from tests.kernels.linear.column_library import ColumnLibrary


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ColumnLibrary]:
    fake = ColumnLibrary()
    monkeypatch.setattr(gemm_cublaslt, "_library", lambda: fake)
    monkeypatch.setattr(gemm_cublaslt, "_handle", lambda device: ctypes.c_void_p(1))
    monkeypatch.setattr(gemm_cublaslt, "_stream", lambda device: 0)
    monkeypatch.setattr(gemm_cublaslt, "_available", lambda device: True)
    for made in (gemm_cublaslt._product, gemm_cublaslt.product_by):
        made.cache_clear()
    yield fake
    for made in (gemm_cublaslt._product, gemm_cublaslt.product_by):
        made.cache_clear()
    gc.collect()
