"""The dense layer through cuBLASLt without split k: an element is one sum in one order, however many rows there are.

Through torch the library may divide k among programs where rows are few, and then adds up in another order. Called
directly it can be told not to. On a Hopper GPU a row then has the same bits in every batch, which was measured and is
what tests/gpu/kernels/test_gemm_cublaslt_gpu.py checks. 32-bit floats, small weights and other GPUs are left to own
kernels. Called directly it also takes an algorithm that was measured to be faster than the one it would choose
(`measured_algorithms`).
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata.kernels.device_limits import DeviceLimits

IMPLEMENTATION = "cublaslt"

# As it was measured. With none at all, few rows took three times as long.
WORKSPACE_BYTES = 1024
# Bytes that addresses and rows are multiples of: what the fast kernels load at once.
ALIGNMENT = 16
# Elements of a weight as the layers of a model have it; what was measured is the products of those.
MIN_ELEMENTS = 1 << 20
# The compute capability on which that was.
_HOPPER = (9, 0)
# Of an algorithm, a value that is the caller's to keep and the library's alone to understand.
ALGORITHM_BYTES = 64
# Shapes that stay prepared. One takes about a kilobyte; prompts of every length come by.
_MAX_PRODUCTS = 8192

# Values in the public headers cublasLt.h, cublas_api.h and library_types.h, the same in CUDA 12 and 13.
_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
_R_32F = 0
_COMPUTE_32F = 68
_OP_T = 1
_EPILOGUE_BIAS = 4
_REDUCTION_SCHEME_NONE = 0
_DESC_TRANSA, _DESC_EPILOGUE, _DESC_BIAS_POINTER = 3, 7, 8
_PREF_MAX_WORKSPACE_BYTES, _PREF_REDUCTION_SCHEME_MASK = 1, 3
_PREF_MIN_ALIGNMENT_BYTES = (5, 6, 7, 8)  # of A, B, C and D


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspaceSize", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("wavesCount", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_SET_ATTRIBUTE = (_POINTER, _INT, _POINTER, _SIZE)
_ARGUMENTS = {
    "cublasLtCreate": (_POINTER,),
    "cublasLtMatmulDescCreate": (_POINTER, _INT, _INT),
    "cublasLtMatmulDescSetAttribute": _SET_ATTRIBUTE,
    "cublasLtMatmulDescDestroy": (_POINTER,),
    "cublasLtMatrixLayoutCreate": (_POINTER, _INT, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "cublasLtMatrixLayoutDestroy": (_POINTER,),
    "cublasLtMatmulPreferenceCreate": (_POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": _SET_ATTRIBUTE,
    "cublasLtMatmulPreferenceDestroy": (_POINTER,),
    "cublasLtMatmulAlgoGetHeuristic": (*(_POINTER,) * 7, _INT, _POINTER, _POINTER),
    "cublasLtMatmulAlgoCheck": (_POINTER,) * 8,
    "cublasLtMatmul": (*(_POINTER,) * 14, _SIZE, _POINTER),
}


@cache
def _library() -> Any:
    """The cuBLASLt that torch has loaded into this process, None if it has not or has no device for it."""
    if not torch.cuda.is_available():  # torch's builds for CUDA load it anyway
        return None
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    paths = sorted({line.split(maxsplit=5)[5] for line in lines if "libcublasLt.so" in line})
    if not paths:
        return None
    library = ctypes.CDLL(paths[0])
    for name, arguments in _ARGUMENTS.items():
        getattr(library, name).argtypes = arguments
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    library.cublasLtGetVersion.restype = _SIZE
    return library


def version() -> int | None:
    """Which cuBLASLt is loaded: algorithms of one mean nothing to another. None without it."""
    library = _library()
    return None if library is None else int(library.cublasLtGetVersion())


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the library. Raises RuntimeError, with the library's reason, unless it succeeds."""
    library = _library()
    status = getattr(library, name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed: {library.cublasLtGetStatusString(status).decode()} (status {status})")


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    """The library's state on a device, made once: it belongs to the context that is current then."""
    made = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(made))
    return made


@cache
def _workspace(device: torch.device) -> Tensor:
    """[WORKSPACE_BYTES] on a device, always the same: the products of a step run one after the other."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


class CublasLtProduct:
    """One shape of product, prepared: how its operands lie, and an algorithm for it, by default the library's choice.

    x [rows, width], x_stride elements from row to row; weight [out, width] with weight_stride; result [rows, out]. The
    library stores by columns, so it is told of the transposes: result^T = (weight^T)^T @ x^T.
    Raises RuntimeError if the library has no algorithm without split k, or refuses the one that was given.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        rows: int,
        out: int,
        width: int,
        x_stride: int,
        weight_stride: int,
        biased: bool,
        algorithm: bytes | None = None,
    ) -> None:
        kind = _TYPES[dtype]
        self._handle, self._workspace = _handle(device), _workspace(device)
        self._description = self._make("MatmulDesc", _COMPUTE_32F, _R_32F)
        self._describe(_DESC_TRANSA, ctypes.c_int32(_OP_T))
        if biased:
            self._describe(_DESC_EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
            # While an algorithm is chosen, this address tells nothing but its alignment.
            self._describe(_DESC_BIAS_POINTER, ctypes.c_void_p(ALIGNMENT))
        self._weight = self._make("MatrixLayout", kind, width, out, weight_stride)
        self._x = self._make("MatrixLayout", kind, width, rows, x_stride)
        self._result = self._make("MatrixLayout", kind, out, rows, out)
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._name = f"{rows} rows by [{out}, {width}] in {dtype}"
        self._algorithm = self._first() if algorithm is None else self._checked(algorithm)

    def _make(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """An object of the library, which lives as long as this product."""
        made = ctypes.c_void_p()
        _call(f"cublasLt{kind}Create", ctypes.byref(made), *arguments)
        weakref.finalize(self, _call, f"cublasLt{kind}Destroy", made).atexit = False
        return made

    def _describe(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        _call("cublasLtMatmulDescSetAttribute", self._description, attribute, ctypes.byref(value), size)

    def _layouts(self) -> tuple[ctypes.c_void_p, ...]:
        return self._weight, self._x, self._result, self._result

    def proposals(self, most: int) -> list[bytes]:
        """Algorithms without split k that the library proposes, at most so many, the one it would choose first."""
        return [bytes(found.algo) for found in self._proposed(most)]

    def _proposed(self, most: int) -> list[_HeuristicResult]:
        preference = self._make("MatmulPreference")
        preferred = {
            _PREF_MAX_WORKSPACE_BYTES: ctypes.c_uint64(WORKSPACE_BYTES),
            _PREF_REDUCTION_SCHEME_MASK: ctypes.c_uint32(_REDUCTION_SCHEME_NONE),
            **{attribute: ctypes.c_uint32(ALIGNMENT) for attribute in _PREF_MIN_ALIGNMENT_BYTES},
        }
        for attribute, value in preferred.items():
            size = ctypes.sizeof(value)
            _call("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.byref(value), size)
        found, count = (_HeuristicResult * most)(), ctypes.c_int()
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._description,
            *self._layouts(),
            preference,
            most,
            ctypes.byref(found),
            ctypes.byref(count),
        )
        return [one for one in found[: count.value] if one.state == 0]

    def _first(self) -> Any:
        found = self._proposed(1)
        if not found:
            raise RuntimeError(f"cuBLASLt has no algorithm without split k for {self._name}")
        return found[0].algo

    def _checked(self, algorithm: bytes) -> Any:
        made = (ctypes.c_uint64 * (ALGORITHM_BYTES // 8)).from_buffer_copy(algorithm)
        found = _HeuristicResult()
        _call(
            "cublasLtMatmulAlgoCheck",
            self._handle,
            self._description,
            *self._layouts(),
            ctypes.byref(made),
            ctypes.byref(found),
        )
        if found.workspaceSize > WORKSPACE_BYTES:
            raise RuntimeError(f"the algorithm for {self._name} needs {found.workspaceSize} bytes of workspace")
        return made

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor) -> None:
        """Launch on the current stream of the tensors' device, which is the current device."""
        if bias is not None:
            self._describe(_DESC_BIAS_POINTER, ctypes.c_void_p(bias.data_ptr()))
        target = result.data_ptr()
        _call(
            "cublasLtMatmul",
            self._handle,
            self._description,
            ctypes.byref(self._one),
            weight.data_ptr(),
            self._weight,
            x.data_ptr(),
            self._x,
            ctypes.byref(self._zero),
            target,
            self._result,
            target,
            self._result,
            self._algorithm,
            self._workspace.data_ptr(),
            WORKSPACE_BYTES,
            _stream(x.device),
        )


_product = lru_cache(_MAX_PRODUCTS)(CublasLtProduct)


@lru_cache(_MAX_PRODUCTS)
def product_by(
    algorithm: bytes, device: torch.device, dtype: torch.dtype, rows: int, out: int, width: int
) -> CublasLtProduct | None:
    """The product of contiguous operands without a bias by this algorithm; None if the library refuses it for them."""
    try:
        return CublasLtProduct(device, dtype, rows, out, width, width, width, False, algorithm)
    except RuntimeError:
        return None


@cache
def _available(device: torch.device | DeviceLimits) -> bool:
    here = isinstance(device, DeviceLimits) or device.type == "meta" or _library() is not None
    return here and DeviceLimits.of(device).capability == _HOPPER


def supports(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether `cublaslt_linear` can run these. It depends on the weight alone, so a row always goes the same way."""
    out, width = weight.shape
    unit = ALIGNMENT // weight.element_size()
    return (
        x.dtype == weight.dtype
        and weight.dtype in _TYPES
        and weight.numel() >= MIN_ELEMENTS
        and weight.stride(1) == 1
        and all(size % unit == 0 for size in (out, width, weight.stride(0)))
        and weight.data_ptr() % ALIGNMENT == 0
        and (bias is None or (bias.data_ptr() % ALIGNMENT == 0 and bias.stride(0) == 1))
        and _available(weight.device)
    )


def cublaslt_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias` as `linear`: x [..., width], weight [out, width], 16-bit floats -> [..., out].

    Sums are float32 and take the bias before they are rounded. It can be captured in a CUDA graph once a product of the
    same shape has run. Raises RuntimeError, with the library's reason, if the library refuses.
    """
    out, width = weight.shape
    result = torch.empty((*x.shape[:-1], out), dtype=x.dtype, device=x.device)
    if result.numel() and not result.is_meta:
        rows = _aligned(x.reshape(-1, width))
        shape = (rows.shape[0], out, width, rows.stride(0), weight.stride(0))
        _product(x.device, x.dtype, *shape, bias is not None).run(rows, weight, bias, result)
    return result


def _aligned(rows: Tensor) -> Tensor:
    """[rows, width], copied if the rows do not lie as the kernels can load them."""
    stride = rows.stride(0)
    unit = ALIGNMENT // rows.element_size()
    fits = rows.stride(1) == 1 and stride >= rows.shape[1] and stride % unit == 0 and rows.data_ptr() % ALIGNMENT == 0
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)
