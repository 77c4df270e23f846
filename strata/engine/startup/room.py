"""Options with which an engine has room that has none as it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from strata.engine.engine_config import EngineConfig

_RANKS = (2, 4, 8)


def options_with_room(asked: EngineConfig, plan: Callable[[EngineConfig], object]) -> list[str]:
    """The fewest ranks that have room, and weights in 8 bits if they have: each alone, as `LLM` takes them.

    plan: divides the memory for other options; raises ValueError where it does not suffice, or they cannot be.
    """

    def has_room(**other: Any) -> bool:
        try:
            plan(replace(asked, **other))
        except ValueError:
            return False
        return True

    more = (size for size in _RANKS if size > asked.tensor_parallel_size)
    ranks = next((size for size in more if has_room(tensor_parallel_size=size)), None)
    found = [] if ranks is None else [f"tensor_parallel_size={ranks}"]
    if asked.quantization is None and asked.sparsity is None and has_room(quantization="fp8"):
        found.append("quantization='fp8'")
    return found
