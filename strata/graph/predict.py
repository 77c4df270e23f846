"""How long a step takes: each node by what was measured of its kind or by the roofline, its messages, its launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from strata.graph.cost import NodeCost
from strata.hardware.efficiency import EfficiencyTable
from strata.hardware.figures import Device
from strata.hardware.links import Link
from strata.hardware.prediction import Call, Prediction
from strata.hardware.roofline import Workload, floor
from strata.kernels import tuned

# What stands for a product of which nothing was measured: the same product without what is fused with it.
_PLAIN = "linear"


@dataclass(frozen=True)
class StepPredictor:
    """Predicts steps of a model in `dtype` on a device.

    products: utilization of products, by the operation. others: of decode attention. link: to the other ranks, None if
    there are none.
    """

    device: Device
    dtype: str
    products: Mapping[str, EfficiencyTable]
    others: EfficiencyTable
    link: Link | None = None

    @staticmethod
    def of(
        device: Device, dtype: str, table: tuned.Table, calls: Iterable[Call] = (), link: Link | None = None
    ) -> StepPredictor:
        """By the products in a device's table of tuned kernels, and other calls; without any all is analytic."""
        measured: dict[str, list[Call]] = {}
        for key, choice in table.items():
            shape = (key.rows, key.out, key.width)
            measured.setdefault(key.operation, []).append(("product", key.dtype, shape, choice.seconds))
        products = {operation: EfficiencyTable.of(device, found) for operation, found in measured.items()}
        return StepPredictor(device, dtype, products, EfficiencyTable.of(device, calls), link)

    def step(self, nodes: Iterable[NodeCost], workload: Workload, *, recorded: bool) -> Prediction:
        """All nodes one after the other; or, unless the step is recorded, until the host has launched all kernels.

        What the host does beside launches, and what it waits for between steps, is not in it.
        """
        ran = list(nodes)
        found = Prediction.total(self.node(node, workload) for node in ran)
        if recorded:
            return found
        return _at_least(found, sum(len(node.kernels) for node in ran) * self._seconds("launch"))

    def node(self, node: NodeCost, workload: Workload) -> Prediction:
        """A node of a step: no less than its kernels take in a CUDA graph however little they do."""
        return _at_least(self._work(node, workload), len(node.kernels) * self._seconds("kernel"))

    def _work(self, node: NodeCost, workload: Workload) -> Prediction:
        if node.weight is not None:
            out, width = node.weight
            rows = node.cost.flops // (2 * out * width)
            table = self.products.get(node.operation) or self.products.get(_PLAIN)
            if table is not None and rows > 0 and ("product", self.dtype) in table.columns:
                return table.predict("product", self.dtype, (rows, out, width))
        if (shape := self._decode_shape(node, workload)) is not None and ("decode", self.dtype) in self.others.columns:
            return self.others.predict("decode", self.dtype, shape)
        return Prediction(floor(node.cost, self.device, self.dtype, self.link).seconds, "analytic")

    def _decode_shape(self, node: NodeCost, workload: Workload) -> tuple[int, int, int] | None:
        """See `decode_cost`; None of what reads no keys, and of steps with prompts, which attend otherwise."""
        sequences, cached = len(workload.new), node.cost.cached
        if sequences != workload.tokens or cached < sequences:
            return None
        shared = round(node.cost.flops * getattr(torch, self.dtype).itemsize / (2 * cached))
        return sequences, max(1, shared), cached // sequences

    def _seconds(self, quantity: str) -> float:
        """Of what was measured of the device; nothing where it was not."""
        known = self.device.known(quantity)
        return 0.0 if known is None else known.value


def _at_least(found: Prediction, seconds: float) -> Prediction:
    return found if found.seconds >= seconds else Prediction(seconds, "analytic")
