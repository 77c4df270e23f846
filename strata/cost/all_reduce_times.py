"""How long an all-reduce takes in a CUDA graph, by its algorithm, between as many ranks as were measured or more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from strata.comm.cost import CollectiveCost, all_reduce_cost, flag_cost, one_shot_cost, tree_cost, two_shot_cost
from strata.hardware.prediction import Call, Prediction

# What a rank sends by each, of so many bytes between so many ranks; NCCL takes the quicker of its two.
ALGORITHMS: dict[str, tuple[Callable[[int, int], CollectiveCost], ...]] = {
    "one shot": (one_shot_cost,),
    "one shot and norm": (one_shot_cost,),
    "flags and norm": (flag_cost,),
    "two shots": (two_shot_cost,),
    "nccl": (all_reduce_cost, tree_cost),
}


@dataclass(frozen=True)
class Curve:
    """What one algorithm took: bytes that a rank sent and seconds, by size. messages: how many, one after another."""

    points: tuple[tuple[int, float], ...]
    messages: int

    def seconds(self, sent: int) -> float:
        """Linear between its neighbours; smaller ones take what the smallest did, larger ones go on as the last two."""
        if sent <= self.points[0][0]:
            return self.points[0][1]
        at = next((pair for pair in pairwise(self.points) if sent <= pair[1][0]), self.points[-2:])
        (low, first), (high, second) = at
        return first + (second - first) * (sent - low) / (high - low)


@dataclass(frozen=True)
class AllReduceTimes:
    """By algorithm (one of `ALGORITHMS`). latency: of a message, of which others are sent more than where it was
    measured. ranks: between how many that was.
    """

    curves: Mapping[str, Curve]
    latency: float
    ranks: int

    @staticmethod
    def of(calls: Iterable[Call], latency: float) -> AllReduceTimes | None:
        """From calls whose kind is the algorithm and whose shape is (ranks, bytes), all between as many ranks.

        None without any. Raises ValueError for another algorithm, other numbers of ranks or a single size.
        """
        found: dict[str, dict[int, float]] = {}
        counts = set()
        for kind, _, (ranks, nbytes), seconds in calls:
            if kind not in ALGORITHMS:
                raise ValueError(f"all-reduce by {kind!r} is unknown; known are {', '.join(ALGORITHMS)}")
            counts.add(ranks)
            found.setdefault(kind, {})[ALGORITHMS[kind][0](nbytes, ranks).bytes] = seconds
        if not found:
            return None
        if len(counts) > 1 or min(map(len, found.values())) < 2:
            raise ValueError(
                f"all-reduces between {sorted(counts)} ranks; give two sizes or more of one number of ranks"
            )
        ranks = counts.pop()
        curves = {
            kind: Curve(tuple(sorted(points.items())), ALGORITHMS[kind][0](0, ranks).messages)
            for kind, points in found.items()
        }
        return AllReduceTimes(curves, latency, ranks)

    def predict(self, algorithm: str, nbytes: int, ranks: int) -> Prediction | None:
        """Of `nbytes` on each rank; None of an algorithm that was not measured.

        Between other numbers of ranks as a message in which a rank sends as much, and a link's latency for each message
        that goes before another.
        """
        curve = self.curves.get(algorithm)
        if curve is None:
            return None
        costs = [cost(nbytes, ranks) for cost in ALGORITHMS[algorithm]]
        seconds = min(curve.seconds(cost.bytes) + (cost.messages - curve.messages) * self.latency for cost in costs)
        if ranks != self.ranks:
            return Prediction(seconds, "analytic")
        sizes = [size for size, _ in curve.points]
        if costs[0].bytes in sizes:
            return Prediction(seconds, "measured")
        return Prediction(seconds, "interpolated" if sizes[0] < costs[0].bytes < sizes[-1] else "analytic")

    def sent(self, nbytes: int) -> Prediction | None:
        """Of another collective of NCCL's, in which a rank sends so many bytes: as its all-reduce."""
        curve = self.curves.get("nccl")
        return None if curve is None else Prediction(curve.seconds(nbytes), "analytic")
