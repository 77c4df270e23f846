"""Tells of each kernel that Triton compiles or reads from the disk, and of each plan that PyTorch builds for cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from strata.kernels.attention.library_plans import library_plans
from strata.kernels.triton_import import HAS_TRITON, triton

Kind = Literal["kernel", "cached kernel", "plan"]
KINDS: tuple[Kind, ...] = ("kernel", "cached kernel", "plan")


@dataclass(frozen=True)
class Compiled:
    """Something that the process did not have ready when it was wanted.

    kind: a kernel that was compiled (hundreds of milliseconds), one that was read from the cache on disk (a few), or a
        library's plan for one shape (some tens).
    name: of the kernel's function, or of what is planned. variant: the constants or the shape that it is for.
    """

    kind: Kind
    name: str
    variant: str


def listen(listener: Callable[[Compiled], None]) -> Callable[[], None]:
    """Tell `listener` of all that the process compiles and plans, whoever asks for it; calling the result ends that.

    Triton tells one listener only. What stands there is kept and goes on hearing.
    """

    def on_triton(*, src: Any, cache_hit: bool, **_: Any) -> None:
        listener(Compiled("cached kernel" if cache_hit else "kernel", src.name, _variant(src)))

    def on_plan(shape: str) -> None:
        listener(Compiled("plan", "cuDNN attention", shape))

    ends = [_join(library_plans(), "listeners", on_plan)]
    if HAS_TRITON:
        ends.append(_join(_triton_hooks(), "calls", on_triton))

    def end() -> None:
        for leave in ends:
            leave()

    return end


def _join(chain: Any, name: str, told: Callable[..., None]) -> Callable[[], None]:
    """Add to a chain's listeners, its attribute of that name; calling the result takes out again. Each time the chain
    gets a new list: the one before may just be gone through, and nobody in it is to be left out.
    """
    setattr(chain, name, [*getattr(chain, name), told])

    def leave() -> None:
        setattr(chain, name, [one for one in getattr(chain, name) if one is not told])

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
