"""What kernels reach inside long steps of training, where a device is at its power limit and messages run beside."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from strata.cost.efficiency import UtilizationColumn
from strata.hardware.figures import TERA, Device


@dataclass(frozen=True)
class TrainingRates:
    """Of one device. Products: FLOP/s by the width of the model, since the wider it is the more of a step they are, and
    the more power it takes. Attention: by head size; the backward pass without the scores that it computes again.

    wide, narrow: products of 16 and of 8 bits. traffic: bytes/s through memory of norms, activations, updates. gap:
    seconds between two kernels, and of the small ones there. copied: bytes of an element of the weights that FSDP
    copies each time a batch passes. modules: how many times as long computation takes where matrices, layers or experts
    are divided, and modules run kernel by kernel. beside: the share of a link's bandwidth that is left to messages
    while products run. slowed: the share of its time that computation loses beside messages.
    streamed: the share of the host link's bandwidth that an update of state on the host reaches.
    """

    wide: UtilizationColumn
    narrow: UtilizationColumn
    attention: UtilizationColumn
    attention_backward: UtilizationColumn
    traffic: float
    gap: float
    copied: int
    modules: float
    beside: float
    slowed: float
    streamed: float
    source: str
    date: str

    def scaled(self, one: Device, other: Device) -> TrainingRates:
        """The same shares of what makers promise, on another device."""
        compute, memory = (
            other.ceiling(*of, measured=False).value / one.ceiling(*of, measured=False).value
            for of in (("compute", "bfloat16"), ("bandwidth", None))
        )
        columns = ("wide", "narrow", "attention", "attention_backward")
        faster: dict[str, Any] = {name: _times(getattr(self, name), compute) for name in columns}
        return replace(self, **faster, traffic=self.traffic * memory)


def _times(column: UtilizationColumn, factor: float) -> UtilizationColumn:
    return UtilizationColumn(tuple((size, rate * factor) for size, rate in column.points))


def _rates(*points: tuple[int, float]) -> UtilizationColumn:
    return UtilizationColumn(tuple((size, rate * TERA) for size, rate in points))


# By the device's key in strata.hardware.specs.
TRAINING_RATES = {
    "h200": TrainingRates(
        wide=_rates((2048, 655), (4096, 685)),
        narrow=_rates((2048, 1080), (4096, 1140)),
        attention=_rates((64, 522), (128, 508)),
        attention_backward=_rates((64, 335), (128, 337)),
        traffic=4.12 * TERA,
        gap=20e-6,
        copied=44,
        modules=1.3,
        beside=0.52,
        slowed=0.12,
        streamed=0.9,
        source="of width 2048 and heads of 64 step times of 1B on one H200 over two sequences of 8,192 tokens "
        "(a633b1b) and four of 4,096 (6ac8d16), which differ by attention; of width 4096 and heads of 128 kernels of "
        "a traced step of 8B on two (f82237a), its products without messages beside them from strata bench kernels; "
        "those in 8 bits from step times; what FSDP copies from 8B with cp=2 (f4dcc19), and modules by the step times "
        "of tp=4 and pp=4 (a633b1b) and of ep=2 (f4dcc19), which are 1.27 to 1.35; the streamed update of "
        "benchmarks/optimizer_step.py (6e93380), 49.4 of 55 GB/s",
        date="2026-11-28",
    )
}
