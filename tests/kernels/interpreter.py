"""Triton's interpreter, mended, and without what it does again and again to no end: two thirds of its time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

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
