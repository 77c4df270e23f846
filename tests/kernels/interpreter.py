"""Triton's interpreter, mended, and without what it does again and again to no end: most of its time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from strata.kernels.triton_import import tl


def prepare_interpreter() -> None:
    """Before the first launch of a process that interprets all kernels.

    Under newer numpys Triton 3.6 takes no bounds of loops: it does then. It replaces all functions of its language in
    every launch and every call of a function: here once, for good. Of each sum and product of integers it finds out
    whether they overflow, and asserts that in debug mode alone, which is off: it is left out.
    """
    patch_language, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = with_index
    patch_language(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    of_number = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: of_number(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.np = SimpleNamespace(**(vars(np) | {"matmul": product}))
    _keep_types()
    _leave_equal_shapes()


def product(a: NDArray[Any], b: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """a [.., m, k], b [.., k, n] -> [.., m, n]. The bits of a row follow from that row and b, as those of a GPU's
    instruction do: numpy's own is a library's, which on some processors takes a row otherwise at the end of a block."""
    a, b = a.astype(dtype), b.astype(dtype)
    found = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        found += a[..., :, k, None] * b[..., k, None, :]
    return found


def _keep_types() -> None:
    """What it makes anew for each result and is the same for all of a type: the type of a block, and what a tensor says
    of its shape. A type equals itself, whatever its name."""
    make_block, make_tensor, is_equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    blocks: dict[Any, dict[str, Any]] = {}

    def block(self: Any, element: Any, shape: Any) -> None:
        key = (element.name, getattr(element, "address_space", None), *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = self.__dict__
        self.__dict__ = blocks[key]

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        known = kind.__dict__.get("of_tensors")
        if known is None:
            make_tensor(self, handle, kind)
            known = kind.__dict__["of_tensors"] = {name: getattr(self, name) for name in ("shape", "numel", "dtype")}
        self.__dict__.update(known, handle=handle, type=kind)

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.dtype.__eq__ = lambda self, other: self is other or is_equal(self, other)


def _leave_equal_shapes() -> None:
    """Two tensors of one shape need no common one, which it would find number by number."""
    broadcast = TritonSemantic.broadcast_impl_value

    def together(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
        first, second = one.type, other.type
        alike = first.is_block() == second.is_block()
        if alike and (not first.is_block() or first.shape.values == second.shape.values):
            return one, other
        shaped: tuple[Any, Any] = broadcast(self, one, other)
        return shaped

    TritonSemantic.broadcast_impl_value = together
