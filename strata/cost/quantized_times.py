"""How long products and experts take by packed weights, from the way in which their rows are multiplied; and experts
by floats, whose launches, bandwidth and share of the peak are the same.

The constants were fitted to runs and kernels of 8B and 30B-A3B on one H200 (`benchmarks/results/h200_precision.jsonl`;
docs/plan.md says how far off they are), in steps of models where there are any: alone, or in a chain of products, the
same kernels are quicker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.quantized.int4_gemv import in_chunks
from strata.kernels.linear.quantized.small_m import GEMV_WIDTH, dot_shapes
from strata.kernels.linear.small_m_tiles import MAX_ROWS
from strata.kernels.quant.quantized import Scheme, multiplied_in

# Kernels of experts: of a token alone; where values are converted, with the order of rows and the weighted sum; and
# where rows are rounded, twice.
_CHOICES, _CONVERTED, _ROUNDED = 2, 4, 6
# Of an expert, up to which its values are converted: where the times were measured.
_CONVERTED_ROWS = thresholds_of(MEASURED).converted_rows


@dataclass(frozen=True)
class QuantizedTimes:
    """Seconds of a product, or of a mixture's experts, on a device; bandwidths in bytes/s, rates in FLOP/s.

    A kernel takes `launch` beside its work, of few rows by a weight of fewer bytes than `filled` so much less. One
    row by 8 bits or int4 takes `streaming`, by the kind of values, in place of that, its loads having begun beside
    the kernel ahead, and the way of the weight at `bandwidth`. Few rows take `values` for each weight that becomes a
    float in registers, by the kind too, and `row` more for each row of their tiles. Rows in 8 bits take for each
    weight what `tiles` have for the least rows that hold them. More rows than any has take their FLOPs at `rates`, by
    the dtype in which is multiplied ("": the model's), experts at a share of these, `grouped`, and then the way of
    the result. Rows that a kernel of its own rounds take `rounding`, and their way at `quantizing_bandwidth`.
    """

    launch: float
    streaming: Mapping[str, float]
    filled: float
    bandwidth: float
    values: Mapping[str, float]
    row: float
    tiles: tuple[tuple[int, float], ...]
    rates: Mapping[str, float]
    grouped: float
    rounding: float
    quantizing_bandwidth: float

    def product(self, scheme: Scheme, rows: int, shape: tuple[int, int], nbytes: float, written: float) -> float | None:
        """Of so many rows by a weight [out, width] of `nbytes` with its scales, the rows in 8 bits already where the
        scheme rounds so many; None where the weight becomes floats in memory, and of values that were not measured.
        """
        if scheme.values not in self.values:
            return None
        weights, rounds = shape[0] * shape[1], bool(multiplied_in(scheme))
        share = min(1.0, nbytes / self.filled)
        by_integers = scheme.values == "int4" and in_chunks(shape[1], scheme.columns)
        if rows == 1 and (_streams(scheme) or by_integers) and shape[1] <= GEMV_WIDTH:
            return self.streaming[scheme.values] * share + nbytes / self.bandwidth
        start = self.launch * share
        if rows <= (thresholds_of(MEASURED).quantized_rows if rounds else MAX_ROWS):
            *_, most = dot_shapes(rows)[0]
            return start + self._converted(scheme, weights, most * ceil_div(rows, most), nbytes)
        if not rounds:
            return None
        if rows <= thresholds_of(MEASURED).split_rows and not scheme.columns:
            each = next(seconds for most, seconds in self.tiles if rows <= most)
            return start + max(nbytes / self.bandwidth, weights * each)
        compute = 2 * rows * weights / self.rates[multiplied_in(scheme)]
        return self.launch + max(nbytes / self.bandwidth, compute) + written / self.bandwidth

    def with_memory(self, ratio: float) -> QuantizedTimes:
        """By the same processors, beside memory of so many times the bandwidth. `values` and `tiles` are instructions,
        and stay: what they take is no less than the way of the weight."""
        return replace(self, bandwidth=self.bandwidth * ratio, quantizing_bandwidth=self.quantizing_bandwidth * ratio)

    def experts(self, scheme: Scheme, tokens: int, weights: float, flops: float, nbytes: float) -> float | None:
        """Of those experts that so many tokens go to, with so many weights; None of values that were not measured."""
        if not weights or scheme.values not in self.values:
            return None
        if tokens == 1 and _streams(scheme):
            return _CHOICES * self.launch + nbytes / self.bandwidth
        rows = flops / (2 * weights)  # of each expert
        dtype = multiplied_in(scheme) if rows > _CONVERTED_ROWS else ""
        compute = flops / (self.grouped * self.rates[dtype])
        if dtype:
            return _ROUNDED * self.launch + max(nbytes / self.bandwidth, compute)
        return _CONVERTED * self.launch + max(self._converted(scheme, weights, rows, nbytes), compute)

    def plain_experts(self, tokens: int, flops: float, nbytes: float) -> float:
        """The same by weights that are not packed."""
        if tokens == 1:
            return _CHOICES * self.launch + nbytes / self.bandwidth
        return _CONVERTED * self.launch + max(nbytes / self.bandwidth, flops / (self.grouped * self.rates[""]))

    def expanded(self, weights: float, nbytes: float, itemsize: int) -> float:
        """To make floats of packed weights in memory."""
        return self.launch + (nbytes + itemsize * weights) / self.bandwidth

    def quantizing(self, rows: int, width: int, itemsize: int) -> float:
        """To round rows of floats by a kernel of its own."""
        return self.rounding + rows * width * (itemsize + 1) / self.quantizing_bandwidth

    def _converted(self, scheme: Scheme, weights: float, rows: float, nbytes: float) -> float:
        return max(nbytes / self.bandwidth, weights * (self.values[scheme.values] + self.row * rows))


def _streams(scheme: Scheme) -> bool:
    """Whether values that one row is multiplied by go past the tensor cores: whole bytes, with scales of rows."""
    return scheme.values in ("e4m3", "int8") and not scheme.columns


# By the name that drivers report. launch: experts of one token. streaming: T2 of 8B, four kernels a layer; of int8
# not measured. values, row: T2 of 8B in int4 when one row was converted too, and products of e4m3 of 2 and 64 rows
# (docs/log.md); int8 and e2m1 were not measured so, and have those of as many bits. tiles: decode steps of 8B, of
# more than 128 rows its products in a chain (`benchmarks.split_products`). float8: T4 of 8B; int8,
# quantizing_bandwidth: products of 8,192 rows. grouped: of plain ones, 484 of 800 TFLOP/s for 8,192 tokens of 30B-A3B
# (docs/log.md), of packed ones not measured. filled: not measured; the least weight that was.
TIMES = {
    "NVIDIA H200": QuantizedTimes(
        launch=4.2e-6,
        streaming={"e4m3": 2.9e-6, "int8": 2.9e-6, "int4": 3.65e-6},
        filled=8.4e6,
        bandwidth=4.28e12,
        values={"e4m3": 0.25e-12, "int8": 0.25e-12, "int4": 0.2033e-12, "e2m1": 0.2033e-12},
        row=0.0024e-12,
        tiles=((64, 0.273e-12), (128, 0.335e-12), (192, 0.463e-12), (256, 0.496e-12)),
        rates={"": 800e12, "float8": 1290e12, "int8": 1340e12},
        grouped=0.6,
        rounding=1.7e-6,
        quantizing_bandwidth=3.4e12,
    )
}
