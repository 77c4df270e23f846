"""How much of the roofline kernels reach, by shape: tables of utilization, from which times are predicted.

What is kept and interpolated is the roofline's time over the measured one, not the time: it changes little from shape
to shape where the time changes by orders of magnitude, and no prediction falls below the floor.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from strata.hardware.figures import Device
from strata.hardware.prediction import Call, Prediction
from strata.hardware.roofline import Cost

# Of operands and of results.
_BYTES = {
    "float32": (4, 4), "tf32": (4, 4), "bfloat16": (2, 2), "float16": (2, 2), "float8": (1, 2), "int8": (1, 4),
}  # fmt: skip

_NEAREST = 2
# Times that were equal may differ by so much once they have gone through utilizations.
_ROUNDING = 1e-12

Shape = tuple[int, ...]


def product_cost(dtype: str, shape: Shape) -> Cost:
    """Of [rows, width] by a weight [out, width]: shape is (rows, out, width). Raises ValueError for other dtypes."""
    rows, out, width = shape
    operand, result = _sizes(dtype)
    weight = out * width * operand
    return Cost(2 * rows * out * width, rows * width * operand + weight, rows * out * result, weight)


def attention_cost(dtype: str, shape: Shape) -> Cost:
    """Of causal prompts, each pair of a query and a key that it may see: (sequences, heads, tokens, head size)."""
    sequences, heads, tokens, size = shape
    element = sequences * heads * tokens * size * _sizes(dtype)[0]
    return Cost(2 * sequences * heads * size * tokens * (tokens + 1), 3 * element, element)


@dataclass(frozen=True)
class Kind:
    """What is measured by shape. cost: from dtype and shape. along: the place in a shape that interpolation follows
    first, since what else is in it belongs to a model and stays.
    """

    cost: Callable[[str, Shape], Cost]
    along: int


def decode_cost(dtype: str, shape: Shape) -> Cost:
    """Attention of one token of each of some sequences: (sequences, query heads that share a key, bytes of keys and
    values of each sequence)."""
    sequences, shared, nbytes = shape
    flops = 2 * sequences * shared * nbytes // _sizes(dtype)[0]
    return Cost(flops, sequences * nbytes, cached=sequences * nbytes)


def prompt_cost(dtype: str, shape: Shape) -> Cost:
    """Causal attention of prompts behind cached tokens: (sequences, heads, new tokens, cached tokens, head size)."""
    sequences, heads, tokens, cached, size = shape
    element = sequences * heads * size * _sizes(dtype)[0]
    pairs = tokens * cached + tokens * (tokens + 1) // 2
    return Cost(4 * sequences * heads * size * pairs, element * (3 * tokens + 2 * cached), element * tokens)


def traffic_cost(dtype: str, shape: Shape) -> Cost:
    """Of what moves so many bytes through memory: (bytes,)."""
    return Cost(read=shape[0])


KINDS = {
    "product": Kind(product_cost, 0),
    "attention": Kind(attention_cost, 2),
    "prompt": Kind(prompt_cost, 2),
    "decode": Kind(decode_cost, 0),
    "traffic": Kind(traffic_cost, 0),
}


@dataclass(frozen=True)
class UtilizationColumn:
    """What was measured of shapes that differ in one place alone: that size and the utilization, smallest first."""

    points: tuple[tuple[int, float], ...]

    def encloses(self, size: int) -> bool:
        return self.points[0][0] <= size <= self.points[-1][0]

    def utilization(self, size: int) -> float:
        """Linear in the logarithm of the size between its neighbours; beyond the ends, what it is there."""
        sizes = [one for one, _ in self.points]
        at = bisect_left(sizes, size)
        if at < len(sizes) and sizes[at] == size:
            return self.points[at][1]
        if at in (0, len(sizes)):
            return self.points[min(at, len(sizes) - 1)][1]
        (low, first), (high, second) = self.points[at - 1 : at + 1]
        share = math.log(size / low) / math.log(high / low)
        return first + share * (second - first)

    def nearest(self, size: int) -> int:
        """The size itself, or the measured one at the end that it lies beyond."""
        return min(max(size, self.points[0][0]), self.points[-1][0])

    def neighbours(self, size: int) -> tuple[int, int] | None:
        """The measured sizes on both sides of one between them; None for one that was measured or is beyond."""
        sizes = [one for one, _ in self.points]
        at = bisect_left(sizes, size)
        if at in (0, len(sizes)) or sizes[at] == size:
            return None
        return sizes[at - 1], sizes[at]


@dataclass(frozen=True)
class EfficiencyTable:
    """Utilization of a device's roofline, as its maker promises it (as it was measured where nothing is promised), by
    kind (one of KINDS), dtype and shape.
    """

    device: Device
    columns: Mapping[tuple[str, str], Mapping[Shape, UtilizationColumn]]

    @staticmethod
    def of(device: Device, measured: Iterable[Call], most: float = math.inf) -> EfficiencyTable:
        """From (kind, dtype, shape, seconds); of a shape that comes twice the quickest counts. What is of no kind that
        has a cost here, or of a dtype whose peak is not known, is left out; so are calls of a greater utilization than
        `most`.
        """
        found: dict[tuple[str, str], dict[Shape, dict[int, float]]] = {}
        for kind, dtype, shape, seconds in measured:
            if kind not in KINDS or device.known("compute", dtype) is None or dtype not in _BYTES:
                continue
            rest, size = _split(kind, shape)
            utilization = promised_floor(device, kind, dtype, shape) / seconds
            if utilization > most:
                continue
            column = found.setdefault((kind, dtype), {}).setdefault(rest, {})
            column[size] = max(utilization, column.get(size, 0.0))
        return EfficiencyTable(
            device,
            {
                key: {rest: UtilizationColumn(tuple(sorted(points.items()))) for rest, points in columns.items()}
                for key, columns in found.items()
            },
        )

    def predict(self, kind: str, dtype: str, shape: Shape) -> Prediction:
        """The time of one call.

        Measured shapes take what they took. A shape beyond them has their utilization, and, as a small call is mostly
        the beginning and end of its kernels, no fewer seconds beyond its floor than they. Between two measured sizes of
        the same kind of shape the time is also kept between theirs, if the larger took longer. Raises ValueError for a
        kind, or a dtype, that has no cost or peak.
        """
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is unknown; known are {', '.join(KINDS)}")
        floor = promised_floor(self.device, kind, dtype, shape)
        columns = self.columns.get((kind, dtype), {})
        rest, size = _split(kind, shape)
        if not columns:
            return Prediction(self._analytic(kind, dtype, shape), "analytic")
        if (column := columns.get(rest)) is not None and column.encloses(size):
            seconds = floor / column.utilization(size)
            between = column.neighbours(size)
            if between is None:
                return Prediction(seconds, "measured")
            low, high = (self._measured(column, kind, dtype, rest, one) for one in between)
            if low <= high * (1 + _ROUNDING):
                seconds = min(max(seconds, low), max(low, high))
            return Prediction(seconds, "interpolated")
        usable = {other: column for other, column in columns.items() if column.encloses(size)}
        inside = _encloses(list(usable), rest)
        utilization, excess = self._nearby(usable or columns, kind, dtype, rest, size)
        if inside:
            return Prediction(floor / utilization, "interpolated")
        return Prediction(max(floor / utilization, floor + excess), "analytic")

    def _nearby(
        self, columns: Mapping[Shape, UtilizationColumn], kind: str, dtype: str, rest: Shape, size: int
    ) -> tuple[float, float]:
        """Of the nearest measured shapes the utilization, and the seconds beyond their floor: means by the inverse of
        their distance in logarithms. More of them tell less: 483 weights
        of an H200, each left out, are predicted within 2.8 % (median) by two, 3.6 % by four, 24 % by all."""
        if rest in columns:  # a size beyond what was measured of this very kind
            nearest = [(1.0, rest)]
        else:
            nearest = sorted((_distance(other, rest), other) for other in columns)[:_NEAREST]
        whole = sum(1 / distance for distance, _ in nearest)
        utilization = excess = 0.0
        for distance, other in nearest:
            reached = columns[other].utilization(size)
            least = promised_floor(self.device, kind, dtype, _joined(kind, other, columns[other].nearest(size)))
            utilization += reached / distance / whole
            excess += least * (1 / reached - 1) / distance / whole
        return utilization, excess

    def _measured(self, column: UtilizationColumn, kind: str, dtype: str, rest: Shape, size: int) -> float:
        return promised_floor(self.device, kind, dtype, _joined(kind, rest, size)) / column.utilization(size)

    def _analytic(self, kind: str, dtype: str, shape: Shape) -> float:
        """The roofline at measured ceilings where there are some."""
        cost = KINDS[kind].cost(dtype, shape)
        compute, bandwidth = self.device.ceiling("compute", dtype).value, self.device.ceiling("bandwidth").value
        return max(cost.flops / compute, cost.bytes / bandwidth)


def promised_floor(device: Device, kind: str, dtype: str, shape: Shape) -> float:
    """The roofline at what is promised, or at what was measured where nothing is."""
    cost = KINDS[kind].cost(dtype, shape)
    compute = device.known("compute", dtype, measured=False) or device.ceiling("compute", dtype)
    bandwidth = device.known("bandwidth", measured=False) or device.ceiling("bandwidth")
    return max(cost.flops / compute.value, cost.bytes / bandwidth.value)


def _distance(one: Shape, other: Shape) -> float:
    return math.dist([math.log(size) for size in one], [math.log(size) for size in other])


def _encloses(known: list[Shape], rest: Shape) -> bool:
    """Whether every size lies between the least and the greatest that is known in its place."""
    if not known:
        return False
    return all(min(sizes) <= size <= max(sizes) for size, *sizes in zip(rest, *known, strict=True))


def _split(kind: str, shape: Shape) -> tuple[Shape, int]:
    along = KINDS[kind].along
    return shape[:along] + shape[along + 1 :], shape[along]


def _joined(kind: str, rest: Shape, size: int) -> Shape:
    along = KINDS[kind].along
    return (*rest[:along], size, *rest[along:])


def _sizes(dtype: str) -> tuple[int, int]:
    if dtype not in _BYTES:
        raise ValueError(f"dtype {dtype!r} has no size here; known are {', '.join(_BYTES)}")
    return _BYTES[dtype]
