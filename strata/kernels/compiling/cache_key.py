"""A kernel's cache key, the same whichever kernel of a process is asked for its own first."""

from __future__ import annotations

import ast
from typing import Any

try:
    from triton.runtime.jit import JITCallable, JITFunction
except ImportError:
    JITCallable, JITFunction = (), object


class OrderlessKernel(JITFunction):  # type: ignore[misc]  # triton is untyped
    """What `triton.jit` makes, with a key that another process finds too.

    Triton 3.6 takes the constants that a called function reads into the caller's key before it has looked for them, so
    only the second kernel that calls it has them in its key (`DependenciesFinder._update_hash`). What one process
    compiled, another would not find on the disk.
    """

    @property
    def cache_key(self) -> str:
        """A SHA-256 of the source, of what it calls, and of the constants that both read."""
        if self.hash is None:
            for called in self._called():
                _ = called.cache_key
        key: str = super().cache_key
        return key

    def _called(self) -> list[Any]:
        """Functions of this module's names that are called or handed on."""
        names = {node.id for node in ast.walk(self.parse()) if isinstance(node, ast.Name)}
        found = (self.__globals__.get(name) for name in sorted(names))
        return [one for one in found if isinstance(one, JITCallable) and one is not self]
