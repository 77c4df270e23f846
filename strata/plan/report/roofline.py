"""The roofline (Williams et al. 2009): where operations lie, by what they reach and what FLOPs and bytes allow them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from strata.plan.explain.explanation import OperationTime, Peaks


@dataclass(frozen=True)
class Point:
    """An operation on the roofline. number: of its row in the table. intensity: FLOPs a byte. reached: FLOP/s."""

    number: int
    operation: OperationTime
    intensity: float
    reached: float


def points(operations: tuple[OperationTime, ...]) -> list[Point]:
    """Of those that compute and move bytes; others have no place on a roofline."""
    return [
        Point(number, one, one.flops / one.bytes, one.flops / one.seconds)
        for number, one in enumerate(operations, 1)
        if one.flops > 0 and one.bytes > 0 and one.seconds > 0
    ]


@dataclass(frozen=True)
class Roofline:
    """The places of a log-log picture, in pixels. measured: seconds of the run; a point's area is its operation's share
    of them."""

    points: list[Point]
    peaks: Peaks
    measured: float
    width: float

    left, right, top, bottom = 48.0, 14.0, 26.0, 40.0

    @property
    def height(self) -> float:
        return min(400.0, round(0.85 * self.width))

    @property
    def end(self) -> float:
        """Where the lines across end."""
        return self.width - self.right

    @property
    def x(self) -> tuple[int, int]:
        """The first and last decade of intensities."""
        return _decades([one.intensity for one in self.points] + [self.peaks.compute / self.peaks.bandwidth])

    @property
    def y(self) -> tuple[int, int]:
        """The first and last decade of FLOP/s."""
        return _decades([one.reached for one in self.points] + [self.peaks.compute])

    def across(self, intensity: float) -> float:
        low, high = self.x
        return self.left + (math.log10(intensity) - low) / (high - low) * (self.end - self.left)

    def up(self, rate: float) -> float:
        low, high = self.y
        room = self.height - self.top - self.bottom
        return self.height - self.bottom - (math.log10(rate) - low) / (high - low) * room

    def radius(self, point: Point) -> float:
        return 9.0 + 14.0 * math.sqrt(point.operation.seconds / self.measured)

    @property
    def across_lines(self) -> Iterator[tuple[str, float]]:
        """Of each decade of intensities its name, where there is room for it, and its place."""
        low, high = self.x
        every = 1 if high - low <= self.width / 70 else 2
        for power in range(low, high + 1):
            yield "" if (power - low) % every else _power(power), self.across(10.0**power)

    @property
    def up_lines(self) -> Iterator[tuple[str, float]]:
        low, high = self.y
        return ((_power(power), self.up(10.0**power)) for power in range(low, high + 1))

    @property
    def corners(self) -> list[tuple[float, float]]:
        """Of the ceiling: where the memory's slope enters the picture, the ridge, the peak's end."""
        bandwidth, compute = self.peaks.bandwidth, self.peaks.compute
        begin = max(10.0 ** self.x[0], 10.0 ** self.y[0] / bandwidth)  # below it the slope leaves the picture
        found = (begin, begin * bandwidth), (compute / bandwidth, compute), (10.0 ** self.x[1], compute)
        return [(self.across(x), self.up(y)) for x, y in found]

    @property
    def slope(self) -> float:
        """Degrees of the memory's line."""
        (x1, y1), (x2, y2), _ = self.corners
        return math.degrees(math.atan2(y2 - y1, x2 - x1))


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values)) - 0.15), math.ceil(math.log10(max(values)) + 0.15)
    return low, max(high, low + 2)


def _power(power: int) -> str:
    """Ten to a power: 0.01, 1, 100 G."""
    if power < 3:
        return f"{10.0**power:g}"
    prefixes = ("k", "M", "G", "T", "P", "E")
    place = min(power // 3, len(prefixes))
    return f"{10 ** (power - 3 * place):g} {prefixes[place - 1]}"
