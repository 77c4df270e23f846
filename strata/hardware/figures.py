"""What devices can do: every figure with its dtype, dense or sparse, its direction, its source and the date of that.

Units are SI: FLOP/s (operations per second for integers), bytes per second, bytes, watts. Datasheets quote tensor cores
with 2:4 sparsity and links in both directions together; here links are in each direction, and sparse figures say so.
What no source says is not recorded: nothing here is guessed. The table itself is `devices.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

TERA, GIGA, MIB = 1e12, 1e9, 1 << 20
# Of what makers promise; of links they count both directions.
_UNITS = {
    "memory": GIGA, "bandwidth": TERA, "l2": MIB, "l3": MIB, "link": GIGA / 2, "host": GIGA / 2, "power": 1,
}  # fmt: skip
DIRECTIONS = {"bandwidth": "read + written", "link": "each", "host": "each"}
NO_RATES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Source:
    """Where figures stand. date: of the document, of a page without one when it was read; year and month at least."""

    name: str
    url: str
    date: str


@dataclass(frozen=True)
class Figure:
    """One number about a device.

    quantity: "compute" (FLOP/s), "bandwidth" (device memory, bytes/s), "memory", "l2" or "l3" (bytes of a cache that
        all of the device shares), "link" (to all other devices of the kind together, bytes/s), "host" (to the CPU,
        bytes/s), "power" (watts that the device may take), "launch" (seconds of the host for a small kernel),
        "kernel" (seconds that a small one takes in a CUDA graph), "sustained" (FLOP/s that large products hold for
        seconds under the power limit, where "compute" is a short burst) or "step" (seconds of an engine's step beside
        the kernels of its graphs: copies of inputs and ids, the start of a graph, and until the next one begins).
    dtype: of the operands, as torch names it where torch has it ("float8" for either kind); None where none applies.
    sparse: with 2:4 structured sparsity.
    direction: "read + written" (bytes moved either way), or "each" (of the two directions of a link).
    measured: reached by a benchmark on the device, or told by its driver; otherwise promised by the maker.
    url: of the source; None of what was measured here.
    borrowed: measured on another device and moved to this one (`strata.cost.extrapolated_device`).
    """

    quantity: str
    value: float
    source: str
    date: str
    dtype: str | None = None
    sparse: bool = False
    direction: str | None = None
    measured: bool = False
    url: str | None = None
    borrowed: bool = False


@dataclass(frozen=True)
class Cuda:
    """What kernels are compiled for.

    capability: compute capability, (major, minor). shared_bytes: the most shared memory of one thread block.
    processors: multiprocessors that are enabled. threads, blocks: the most of each that one holds at once.
    """

    capability: tuple[int, int]
    shared_bytes: int
    processors: int
    threads: int = 2048
    blocks: int = 32


@dataclass(frozen=True)
class Device:
    """A device and all that is known of it. `key` is its name here, `product` what drivers or systems call it.

    cuda: None of a device that runs no CUDA kernels. price_per_hour: of one device, in the user's currency; Strata
    knows no prices, so it is None until `dataclasses.replace` sets what the user pays.
    """

    key: str
    product: str
    figures: tuple[Figure, ...]
    cuda: Cuda | None = None
    price_per_hour: float | None = None

    def known(self, quantity: str, dtype: str | None = None, *, measured: bool = True) -> Figure | None:
        """The figure to plan with: dense, measured if there is one (unless `measured` is False), else the maker's;
        None where no source says it.
        """
        fitting = [
            figure
            for figure in self.figures
            if (figure.quantity, figure.dtype, figure.sparse) == (quantity, dtype, False)
            and (measured or not figure.measured)
        ]
        return max(fitting, key=lambda figure: figure.measured, default=None)

    def ceiling(self, quantity: str, dtype: str | None = None, *, measured: bool = True) -> Figure:
        """The same. Raises ValueError, naming what is known, if there is none."""
        found = self.known(quantity, dtype, measured=measured)
        if found is None:
            dtypes = ", ".join(sorted(self.dtypes(quantity)))
            wanted = quantity if dtype is None else f"{quantity} in {dtype}"
            raise ValueError(f"no {wanted} is recorded for {self.key}" + (f"; known: {dtypes}" if dtypes else ""))
        return found

    def dtypes(self, quantity: str = "compute") -> set[str]:
        """Those for which a quantity is recorded."""
        return {one.dtype for one in self.figures if one.quantity == quantity and one.dtype is not None}

    def priced(self, seconds: float, devices: int = 1) -> float:
        """What so many devices cost for so long. Raises ValueError if the user gave no price."""
        if self.price_per_hour is None:
            raise ValueError(f"the price of {self.key} is not known here: give what you pay for one of it per hour")
        return self.price_per_hour * devices * seconds / 3600


def promised(
    source: Source, *, dense: Mapping[str, float] = NO_RATES, sparse: Iterable[str] = (), **others: float
) -> list[Figure]:
    """What a source says of a device, in the units of makers: GB, TB/s, tera-operations per second, MiB of caches, GB/s
    of a link in both directions together, watts.

    dense: by dtype, without sparsity. sparse: the dtypes for which 2:4 sparsity doubles them. others: by quantity.
    """

    def figure(quantity: str, value: float, dtype: str | None = None) -> Figure:
        return Figure(
            quantity, value, source.name, source.date, dtype, direction=DIRECTIONS.get(quantity), url=source.url
        )

    found = [figure(quantity, value * _UNITS[quantity]) for quantity, value in others.items()]
    rates = [figure("compute", value * TERA, dtype) for dtype, value in dense.items()]
    doubled = set(sparse)
    return found + rates + [replace(one, value=2 * one.value, sparse=True) for one in rates if one.dtype in doubled]


def reached(source: str, date: str, **values: float | Mapping[str, float]) -> Iterator[Figure]:
    """What was measured on a device, in SI units: by quantity, or by quantity and dtype."""
    for quantity, value in values.items():
        for dtype, one in value.items() if isinstance(value, Mapping) else [(None, value)]:
            direction = DIRECTIONS.get(quantity)
            yield Figure(quantity, one, source, date, dtype, direction=direction, measured=True)
