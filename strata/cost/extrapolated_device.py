"""What was measured on a device, moved to another one with the same multiprocessors and other memory.

Of each call the start of its kernel stays, as long as the smallest takes in a CUDA graph, and the rest keeps its
utilization of the roofline. Of 385 steps that an H100 SXM took (`benchmarks/results/h100_predictions.jsonl`) nine
tenths are then within 10.6 %, by calls of an H200; with utilization alone it is 11.7 %, where small calls of 0.6B
become too slow, and with the seconds beyond the floor kept 11.4 %, where decodes of 1B and 8B become too fast
(docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from strata.cost.efficiency import KINDS, promised_floor
from strata.hardware import measured
from strata.hardware.figures import Device, Figure
from strata.hardware.prediction import Call
from strata.hardware.specs import DEVICES

# Figures that are rates, by the promised one that they are moved with; the others are what hosts and launches take.
_MOVED_WITH = {"bandwidth": "bandwidth", "compute": "compute", "sustained": "compute"}
_KEPT = ("launch", "kernel", "step")
_SUMS = "all_reduce"  # the operation whose calls go over links


@dataclass(frozen=True)
class ExtrapolatedDevice:
    """From the device `lender` to the device `borrower`, of which nothing was measured that comes with Strata."""

    lender: Device
    borrower: Device

    @staticmethod
    def to(device: Device, folder: Path = measured.FOLDER) -> ExtrapolatedDevice | None:
        """None for a device with measured calls of its own, and where no device that has some has as many
        multiprocessors of its compute capability. folder: of the files of measured calls.
        """
        if device.cuda is None or measured.path_of(device.product, folder).is_file():
            return None
        for other in DEVICES.values():
            if other.cuda == device.cuda and measured.path_of(other.product, folder).is_file():
                return ExtrapolatedDevice(other, device)
        return None

    @property
    def memory(self) -> float:
        """How many times as much bandwidth of memory the borrower's maker promises."""
        return self._ratio("bandwidth")

    @property
    def has_same_links(self) -> bool:
        one, other = (of.known("link", measured=False) for of in (self.lender, self.borrower))
        return one is not None and other is not None and one.value == other.value

    def calls(self, of_lender: dict[str, list[Call]]) -> dict[str, list[Call]]:
        """Those of the lender, by operation. Sums over ranks are as they were between links that are as fast, and left
        out between others; so is what has no cost.
        """
        found = {operation: list(self.moved(each)) for operation, each in of_lender.items() if operation != _SUMS}
        if self.has_same_links and _SUMS in of_lender:
            found[_SUMS] = list(of_lender[_SUMS])
        return {operation: each for operation, each in found.items() if each}

    def moved(self, calls: Iterable[Call]) -> Iterable[Call]:
        """Those whose kind has a cost and whose dtype both have a peak of: as long beyond the start of a kernel as the
        roofline says, by the same utilization."""
        kernel = self.lender.known("kernel")
        for kind, dtype, shape, seconds in calls:
            if kind in KINDS and all(one.known("compute", dtype) is not None for one in (self.lender, self.borrower)):
                before, after = (promised_floor(one, kind, dtype, shape) for one in (self.lender, self.borrower))
                start = 0.0 if kernel is None else max(0.0, min(kernel.value, seconds - before))
                yield kind, dtype, shape, start + (seconds - start) * after / before

    def device(self) -> Device:
        """The borrower with what was measured of the lender's memory, products, launches and steps, in the ratio of
        what makers promise, where nothing of it was measured."""
        known = {(one.quantity, one.dtype) for one in self.borrower.figures if one.measured}
        lent = [
            self._moved(one) for one in self.lender.figures if one.measured and (one.quantity, one.dtype) not in known
        ]
        return replace(self.borrower, figures=(*self.borrower.figures, *(one for one in lent if one is not None)))

    def _moved(self, figure: Figure) -> Figure | None:
        source = f"as on {self.lender.key}: {figure.source}"
        if figure.quantity in _KEPT:
            return replace(figure, source=source, borrowed=True)
        quantity = _MOVED_WITH.get(figure.quantity)
        if quantity is None or self.borrower.known(quantity, figure.dtype, measured=False) is None:
            return None
        value = figure.value * self._ratio(quantity, figure.dtype)
        return replace(figure, value=value, source=source, borrowed=True)

    def _ratio(self, quantity: str, dtype: str | None = None) -> float:
        one, other = (of.ceiling(quantity, dtype, measured=False) for of in (self.lender, self.borrower))
        return other.value / one.value

    def __str__(self) -> str:
        """What was lent, in words."""
        sums = "" if self.has_same_links else "; nothing of messages, whose links differ"
        return (
            f"calls and ceilings borrowed from {self.lender.product}, which has as many multiprocessors of the same "
            f"kind: each call takes the start of a kernel as there, the rest by the same utilization of the roofline "
            f"({self.memory:.2f} times the bandwidth){sums}"
        )
