"""The roofline (Williams et al. 2009): what operations reach and what their FLOPs and bytes allow, log-log, as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.plan.explain.explanation import OperationTime, Peaks
from strata.plan.report.markup import Markup, element
from strata.plan.report.units import quantity, seconds, share


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
class _Axes:
    """Decades that fit into a picture of so many pixels."""

    width: float
    height: float
    x: tuple[int, int]
    y: tuple[int, int]

    left, right, top, bottom = 48.0, 14.0, 26.0, 40.0

    def across(self, intensity: float) -> float:
        low, high = self.x
        return self.left + (math.log10(intensity) - low) / (high - low) * (self.width - self.left - self.right)

    def up(self, rate: float) -> float:
        low, high = self.y
        room = self.height - self.top - self.bottom
        return self.height - self.bottom - (math.log10(rate) - low) / (high - low) * room


def roofline(found: list[Point], peaks: Peaks, measured: float, width: int) -> Markup:
    """The picture. measured: seconds of the run; a point's area is its operation's share of them. width: in pixels."""
    ridge = peaks.compute / peaks.bandwidth
    across = [one.intensity for one in found] + [ridge]
    up = [one.reached for one in found] + [peaks.compute]
    axes = _Axes(width, min(400.0, 0.85 * width), _decades(across), _decades(up))
    label = f"Roofline of {len(found)} operations; the table of operations has the same figures."
    return element(
        "svg",
        *_grid(axes),
        *_ceilings(axes, peaks),
        *(_drawn(one, axes, measured) for one in sorted(found, key=lambda one: -one.operation.seconds)),
        viewBox=f"0 0 {width} {axes.height:.0f}",
        role="img",
        aria_label=label,
    )


def _decades(values: list[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values)) - 0.15), math.ceil(math.log10(max(values)) + 0.15)
    return low, max(high, low + 2)


def _grid(axes: _Axes) -> list[Markup]:
    bottom, right = axes.height - axes.bottom, axes.width - axes.right
    made = []
    every = 1 if axes.x[1] - axes.x[0] <= axes.width / 70 else 2
    for power in range(axes.x[0], axes.x[1] + 1):
        x = axes.across(10.0**power)
        made.append(element("line", x1=x, x2=x, y1=axes.top, y2=bottom, class_="grid"))
        if (power - axes.x[0]) % every == 0:
            made.append(element("text", _power(power), x=x, y=bottom + 16, text_anchor="middle"))
    for power in range(axes.y[0], axes.y[1] + 1):
        y = axes.up(10.0**power)
        made.append(element("line", x1=axes.left, x2=right, y1=y, y2=y, class_="grid"))
        made.append(element("text", _power(power), x=axes.left - 6, y=y + 4, text_anchor="end"))
    middle = (axes.left + right) / 2
    made.append(element("text", "FLOPs a byte", x=middle, y=axes.height - 6, text_anchor="middle", class_="axis"))
    made.append(element("text", "FLOP/s", x=4.0, y=axes.top - 14, class_="axis"))
    return made


def _ceilings(axes: _Axes, peaks: Peaks) -> list[Markup]:
    low, high = 10.0 ** axes.x[0], 10.0 ** axes.x[1]
    ridge = peaks.compute / peaks.bandwidth
    begin = max(low, 10.0 ** axes.y[0] / peaks.bandwidth)  # below it the slope leaves the picture
    corners = [(begin, begin * peaks.bandwidth), (ridge, peaks.compute), (high, peaks.compute)]
    line = " ".join(f"{axes.across(x):.1f},{axes.up(y):.1f}" for x, y in corners)
    middle = math.sqrt(begin * ridge)
    x, y = axes.across(middle), axes.up(middle * peaks.bandwidth)
    (x1, y1), (x2, y2) = ((axes.across(x), axes.up(y)) for x, y in corners[:2])
    angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
    turn = f"rotate({angle:.1f} {x:.1f} {y:.1f})"
    compute = quantity(peaks.compute, "FLOP/s")
    return [
        element("polyline", points=line, class_="ceiling"),
        element("text", quantity(peaks.bandwidth, "B/s"), x=x, y=y - 7, text_anchor="middle", transform=turn),
        element("text", compute, x=axes.width - axes.right - 4, y=axes.up(peaks.compute) - 7, text_anchor="end"),
    ]


def _drawn(one: Point, axes: _Axes, measured: float) -> Markup:
    operation = one.operation
    x, y = axes.across(one.intensity), axes.up(one.reached)
    radius = 9.0 + 14.0 * math.sqrt(operation.seconds / measured)
    told = (
        f"{operation.name}: {seconds(operation.seconds)}, {share(operation.seconds, measured)} of the run, "
        f"{quantity(one.reached, 'FLOP/s')}, floor {seconds(operation.floor)}"
    )
    circle = element("circle", element("title", told), cx=x, cy=y, r=radius, class_=f"point {operation.bound}")
    return element("g", circle, element("text", str(one.number), x=x, y=y + 4, text_anchor="middle", class_="inside"))


def _power(power: int) -> str:
    """Ten to a power: 0.01, 1, 100 G."""
    if power < 3:
        return f"{10.0**power:g}"
    prefixes = ("k", "M", "G", "T", "P", "E")
    place = min(power // 3, len(prefixes))
    return f"{10 ** (power - 3 * place):g} {prefixes[place - 1]}"
