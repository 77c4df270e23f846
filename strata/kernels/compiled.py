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

    chains: list[tuple[list[Any], Any]] = [(library_plans().listeners, on_plan)]
    if HAS_TRITON:
        chains.append((_triton_listeners(), on_triton))
    for chain, told in chains:
        chain.append(told)

    def end() -> None:
        for chain, told in chains:
            if told in chain:
                chain.remove(told)

    return end


def _triton_listeners() -> list[Callable[..., None]]:
    """Those whom Triton tells, in its own chain of hooks, which is put where it has room for one."""
    knobs = triton.knobs
    present = knobs.compilation.listener
    if not isinstance(present, knobs.HookChain):
        knobs.compilation.listener = knobs.HookChain()
        if present is not None:
            knobs.compilation.listener.add(present)
    calls: list[Callable[..., None]] = knobs.compilation.listener.calls
    return calls


def _variant(src: Any) -> str:
    """What a source is compiled for: constants, and which arguments are known to be multiples of 16."""
    names = src.fn.arg_names
    constants = [f"{names[path[0]]}={value}" for path, value in src.constants.items()]
    divisible = [f"{names[path[0]]}%16" for path, attributes in src.attrs.items() if attributes]
    return ", ".join((*constants, *divisible))
