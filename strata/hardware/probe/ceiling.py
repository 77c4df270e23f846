"""One measured ceiling, and parts of a probe that run until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# What a ceiling of each quantity is a rate or a time of.
UNITS = {
    "copy": "B/s",
    "read": "B/s",
    "product": "FLOP/s",
    "product, burst": "FLOP/s",
    "product, sustained": "FLOP/s",
    "attention": "FLOP/s",
    "host to device": "B/s",
    "device to host": "B/s",
    "launch": "s",
    "graph launch": "s",
    "kernel in a graph": "s",
    "all_reduce": "s",
    "all_gather": "s",
    "reduce_scatter": "s",
    "all_to_all": "s",
}


@dataclass(frozen=True)
class Ceiling:
    """What was reached, in the unit that `UNITS` has for the quantity.

    copy: bytes read and written. product: of [rows, width] with a weight [out, width]. attention: of causal prompts,
    counting each pair of a query and a key that it may see. launch: of one small kernel by the host; graph launch: of a
    CUDA graph with one. A collective: one call.

    seconds: of one call. shape: (bytes,) of memory and copies and collectives, (rows, out, width) of products,
    (sequences, heads, tokens, head size) of attention. count: threads of a CPU, ranks of a collective; 1 GPU.
    """

    quantity: str
    value: float
    seconds: float
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    count: int = 1
    algorithm: str | None = None

    def __post_init__(self) -> None:
        if self.quantity not in UNITS:
            raise ValueError(f"the quantity {self.quantity!r} is unknown; known are {', '.join(UNITS)}")

    @property
    def unit(self) -> str:
        return UNITS[self.quantity]


@dataclass(frozen=True)
class ProbeItem:
    """What a probe measures in one go: a name, and what yields its ceilings one by one."""

    name: str
    measure: Callable[[], Iterable[Ceiling]]


@dataclass
class Measured:
    """ceilings: what was reached. missing: of each part that ended early or did not run, why."""

    ceilings: list[Ceiling] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def run(self, parts: Iterable[ProbeItem], end: float) -> None:
        """Measure parts until `end`, by `time.perf_counter`. One that fails is noted, and the others still run."""
        for part in parts:
            if time.perf_counter() >= end:
                self.missing[part.name] = "the time was over"
                continue
            try:
                for one in part.measure():
                    self.ceilings.append(one)
                    if time.perf_counter() >= end:
                        self.missing[part.name] = "the time was over before all of it was measured"
                        break
            except Exception as error:  # the other parts are still worth having
                self.missing[part.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
