"""The least seconds that a step can take on a device, from numbers that its plan tells: cheap enough for each step."""

from __future__ import annotations

from dataclasses import dataclass

from strata.cost.step_costs import StepCosts
from strata.hardware.figures import Device
from strata.hardware.links import Link
from strata.hardware.roofline import Cost, Floor, Workload

# One token behind so many others that the attention of every layer without a window grows with them alone.
_REACH = 1 << 40
_NEAR, _FAR = Workload((1,), (_REACH,)), Workload((1,), (2 * _REACH,))


@dataclass(frozen=True)
class StepFloor:
    """As `strata.hardware.roofline.floor` of `StepCosts.step`: weights, keys and values moved once, all products, all
    messages. Layers with a window count as if every token read a whole window of its own.

    compute, bandwidth: of the device, FLOP/s and bytes/s. pair_flops: of a query with a key; key_bytes: of a key and
    its value; bounded: of the layers with a window, FLOPs and bytes of a token.
    """

    costs: StepCosts
    compute: float
    bandwidth: float
    link: Link | None
    pair_flops: float
    key_bytes: float
    bounded: tuple[float, float]

    @classmethod
    def of(cls, costs: StepCosts, device: Device, dtype: str, link: Link | None = None) -> StepFloor:
        """Raises ValueError if the device's peak is not known for `dtype`."""
        linear, bounded = Cost(), Cost()
        for attention, count in costs.states:
            near, far = attention(_NEAR), attention(_FAR)
            for _ in range(count):
                linear, bounded = linear + (far - near), bounded + (near + near - far)
        compute, bandwidth = device.ceiling("compute", dtype).value, device.ceiling("bandwidth").value
        return cls(
            costs,
            compute,
            bandwidth,
            link,
            linear.flops / _REACH,
            linear.cached / _REACH,
            (float(bounded.flops), float(bounded.cached)),
        )

    def of_step(self, tokens: int, rows: int, keys: int, pairs: float) -> Floor:
        """A step of so many tokens that projects so many rows. keys: tokens of its sequences once it has run, whose
        keys it reads, those that several share once; pairs: of queries and keys."""
        costs = self.costs
        flops = costs.token_flops * tokens + costs.row_flops * rows + self.pair_flops * pairs + self.bounded[0] * tokens
        read = costs.weights + costs.token_weights * tokens + self.key_bytes * keys + self.bounded[1] * rows
        for experts, of_rows, layers in costs.mixtures:
            read += layers * experts(rows if of_rows else tokens)
        messages = 0.0
        if self.link is not None:
            sent = costs.token_sent * tokens + costs.row_sent * rows
            messages = self.link.least_seconds(costs.messages, sent)
        return Floor(flops / self.compute, read / self.bandwidth, messages)
