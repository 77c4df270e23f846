"""A stand-in for cuBLASLt: multiplies matrices stored by columns on the CPU, and remembers what it was told."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

TRANSA, EPILOGUE, BIAS_POINTER = 3, 7, 8
DTYPES = {2: torch.float16, 14: torch.bfloat16}


class ColumnLibrary:
    """The functions of cublasLt.h that `strata.kernels.linear.cublaslt` calls, for addresses in host memory."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.made = 0
        self.preferred: dict[int, int] = {}
        self.addresses: list[int] = []
        self.algorithms = 1
        self.status = 0
        self.version = 130100
        self.refused = False
        self.workspace = 0
        self.multiplied_by: list[bytes] = []

    def _new(self, made: Any, content: Any) -> int:
        self.made += 1
        made._obj.value = self.made
        self.objects[self.made] = content
        return 0

    def _set(self, owner: Any, attribute: int, value: Any, size: int) -> int:
        assert size == ctypes.sizeof(value._obj)
        self.objects[owner.value][attribute] = value._obj.value
        return 0

    def _drop(self, owner: Any) -> int:
        del self.objects[owner.value]
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set
    cublasLtMatmulDescDestroy = cublasLtMatmulPreferenceDestroy = cublasLtMatrixLayoutDestroy = _drop

    def cublasLtMatmulDescCreate(self, made: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._new(made, {})

    def cublasLtMatmulPreferenceCreate(self, made: Any) -> int:
        return self._new(made, {})

    def cublasLtMatrixLayoutCreate(self, made: Any, kind: int, rows: int, columns: int, stride: int) -> int:
        assert stride >= rows
        return self._new(made, (DTYPES[kind], rows, columns, stride))

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        preference, count = arguments[6], arguments[9]
        self.preferred = self.objects[preference.value]
        count._obj.value = min(arguments[7], self.algorithms)
        for index in range(count._obj.value):
            arguments[8]._obj[index].algo[0] = index + 1
        return self.status

    def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
        assert [self.objects[one.value] for one in arguments[4:5]] == [self.objects[arguments[5].value]]  # C is D
        arguments[7]._obj.workspaceSize = self.workspace
        return 15 if self.refused else 0

    def cublasLtGetVersion(self) -> int:
        return self.version

    def cublasLtGetStatusString(self, status: int) -> bytes:
        return b"the reason"

    def _matrix(self, address: int, layout: Any) -> Tensor:
        dtype, rows, columns, stride = self.objects[layout.value]
        self.addresses.append(address)
        span = (columns - 1) * stride + rows
        memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (1, stride))

    def cublasLtMatmul(self, *arguments: Any) -> int:
        description, alpha, beta = (self.objects[arguments[1].value], arguments[2]._obj.value, arguments[7]._obj.value)
        assert (alpha, beta, arguments[8], arguments[9]) == (1, 0, arguments[10], arguments[11])
        self.multiplied_by.append(bytes(arguments[12]))
        a, b, d = (self._matrix(arguments[at], arguments[at + 1]) for at in (3, 5, 10))
        product = (a.t() if description.get(TRANSA) == 1 else a).float() @ b.float()
        if description.get(EPILOGUE) == 4:
            memory = (ctypes.c_char * (len(product) * d.element_size())).from_address(description[BIAS_POINTER])
            product += torch.frombuffer(memory, dtype=d.dtype)[:, None]
        d.copy_(product)
        return 0
