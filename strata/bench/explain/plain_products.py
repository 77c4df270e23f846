"""What products of packed weights would take by plain ones, on a CPU, where packed ones are unpacked in every call."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch

from strata.cost.step_model import StepModel
from strata.kernels.linear.linear import linear
from strata.plan.explain.explanation import StepWork
from strata.plan.explain.measurement import MeasuredStep, UnpackedProducts
from strata.plan.explain.split import middle_step

# Calls of a product, of which the median counts.
_CALLS = 5
# Of so many rows by a plain weight [out, width].
ProductSeconds = Callable[[int, int, int], float]


def unpacked_products(
    steps: Sequence[MeasuredStep], times: StepModel, seconds: ProductSeconds, *, asked: bool
) -> UnpackedProducts | None:
    """Of a run on a CPU; None where no product has a packed weight. asked: see `UnpackedProducts`.

    Steps alike in kind and size count as the one in their middle. Products by plain weights beside packed ones (the
    head) count too: what was measured of the operation does not tell them apart.
    """
    groups: dict[tuple[StepWork, int], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        groups[step.kind, (step.tokens - 1).bit_length()].append(step)
    values: set[str] = set()
    calls: Counter[tuple[int, int, int]] = Counter()
    for group in groups.values():
        for node in times.model.step(middle_step(group).workload).model:
            if node.operation == linear.name and node.weight is not None:
                values.add(node.weight_kind)
                calls[math.prod(node.shape[:-1]), *node.weight] += len(group)
    packed = " and ".join(sorted(values - {""}))
    if not packed:
        return None
    plain = math.fsum(count * seconds(*shape) for shape, count in calls.items())
    return UnpackedProducts(packed, linear.name, plain, asked)


def product_here(dtype: torch.dtype, deterministic: bool) -> ProductSeconds:
    """Measures a product as an engine on this CPU runs it: seconds for which its thread had a processor."""
    product = linear.bind("cpu", deterministic=deterministic)

    def seconds(rows: int, out: int, width: int) -> float:
        x, weight = (torch.empty(size, width, dtype=dtype).uniform_(-1, 1) for size in (rows, out))
        product(x, weight)
        took = []
        for _ in range(_CALLS):
            began = time.thread_time()
            product(x, weight)
            took.append(time.thread_time() - began)
        return statistics.median(took)

    return seconds
