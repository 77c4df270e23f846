"""Tells of each kernel that Triton compiles or reads from the disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from strata.kernels.triton_import import HAS_TRITON, triton

Kind = Literal["kernel", "cached kernel"]
KINDS: tuple[Kind, ...] = ("kernel", "cached kernel")


@dataclass(frozen=True)
class Compiled:
    """Something that the process did not have ready when it was wanted.

    kind: a kernel that was compiled (hundreds of milliseconds), or one that was read from the cache on disk (a few).
    name: of the kernel's function. variant: the constants that it is for.
    """

    kind: Kind
    name: str
    variant: str


def listen(listener: Callable[[Compiled], None]) -> Callable[[], None]:
    """Tell `listener` of all that the process compiles, whoever asks for it; calling the result ends that.

    Triton tells one listener only. What stands there is kept and goes on hearing.
    """

    def on_triton(*, src: Any, cache_hit: bool, **_: Any) -> None:
        listener(Compiled("cached kernel" if cache_hit else "kernel", src.name, _variant(src)))

    return _join(_triton_hooks(), on_triton) if HAS_TRITON else lambda: None


def _join(hooks: Any, told: Callable[..., None]) -> Callable[[], None]:
    """Add to a chain of hooks; calling the result takes out again. Each time the chain gets a new list: the one before
    may just be gone through, and nobody in it is to be left out.
    """
    hooks.calls = [*hooks.calls, told]

    def leave() -> None:
        hooks.calls = [one for one in hooks.calls if one is not told]

    return leave


def _triton_hooks() -> Any:
    """Triton's own chain of hooks, put where it has room for one listener."""
    knobs = triton.knobs
    present = knobs.compilation.listener
    if not isinstance(present, knobs.HookChain):
        knobs.compilation.listener = knobs.HookChain()
        if present is not None:
            knobs.compilation.listener.add(present)
    return knobs.compilation.listener


def _variant(src: Any) -> str:
    """What a source is compiled for: constants, and which arguments are known to be multiples of 16. A file of
    intermediate code, as others may compile, tells nothing of it."""
    if not hasattr(src, "fn"):
        return ""
    names = src.fn.arg_names
    constants = [f"{names[path[0]]}={value}" for path, value in src.constants.items()]
    divisible = [f"{names[path[0]]}%16" for path, attributes in src.attrs.items() if attributes]
    return ", ".join((*constants, *divisible))
