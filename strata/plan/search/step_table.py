"""Times of the steps that a load needs, between few that were priced."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

from strata.hardware.roofline import Workload
from strata.models.config import ModelConfig
from strata.parallel.stages import balance
from strata.plan.search.layer_prices import MAX_SEQUENCES, LayerPrices, StepPrice
from strata.plan.search.layout import ServingLayout
from strata.plan.search.precision import Precision
from strata.plan.search.traffic import Traffic

# Decoding sequences of the steps that are priced, alone and beside prompts, and tokens of these; others lie on the
# lines between them. A few less than the sizes of CUDA graphs, since a prompt is a sequence too.
_ALONE = (1, 2, 4, 8, 16, 32, 64, 128, 192, 248, 384, 512, 768, 1000)
_BESIDE = (0, 32, 248, 1000)
_PROMPTS = (256, 1024, 4096, 16384)
# Of a token that goes from stage to stage, what the host takes between two: 8B's takes 4.57 ms through two stages of an
# H200 each and 3.87 through one (docs/parallel_serving.md, 2026-11-22).
_STAGE_SECONDS = 0.35e-3


class Anchors:
    """Steps of a layout that were priced, of one traffic, in several precisions; stages share them.

    decodes: what has priced steps without prompts, which ranks that divide those of prompts all run whole.
    """

    def __init__(
        self, prices: LayerPrices, traffic: Traffic, precisions: Sequence[Precision], decodes: Anchors | None = None
    ) -> None:
        self.prices, self.precisions, self._decodes = prices, list(precisions), decodes
        self._context = max(1, round(traffic.context))
        self._prompt, self._cached = max(1, round(traffic.computed)), round(traffic.cached)
        # Whole prompts are what steps mostly have.
        own = {self._prompt, 2 * self._prompt} if self._prompt <= _PROMPTS[-1] // 2 else set()
        self.prompts = tuple(sorted({*_PROMPTS, *own}))
        self.price = cache(self._price)

    def _price(self, decodes: int, prompts: int) -> dict[Precision, StepPrice]:
        """A step by itself, in each precision."""
        if self._decodes is not None and not prompts:
            return self._decodes.price(decodes, 0)
        chunks = _chunks(prompts, self._prompt)
        # The middle chunk of a prompt in several has half of what comes before the last one behind it.
        behind = [self._cached + max(0, (self._prompt - chunk) // 2) for chunk in chunks]
        new = (1,) * decodes + tuple(chunks)
        total = (self._context,) * decodes + tuple(chunk + start for chunk, start in zip(chunks, behind, strict=True))
        found = self.prices.prices(Workload(new, total), self.precisions)
        return dict(zip(self.precisions, found, strict=True))


class StepTable:
    """How long a stage's step takes that decodes for so many sequences, of a mean context, beside so many tokens of
    prompts. Sequences and tokens are one rank's where ranks have their own."""

    def __init__(self, anchors: Anchors, config: ModelConfig, layout: ServingLayout, precision: Precision) -> None:
        self._anchors, self._precision = anchors, precision
        self._stages, self._share = layout.stages, _fullest_stage(config, layout.stages)
        prices = anchors.prices
        self._sent = config.hidden_size * prices.itemsize
        self._link = None if layout.stages == 1 else prices.machine.link(layout.ranks)
        self._stage = cache(self._stage_seconds)

    def price(self, decodes: int, prompts: int) -> StepPrice:
        """Of all layers of such a step, priced by itself."""
        return self._anchors.price(decodes, prompts)[self._precision]

    def analytic(self, decodes: float, prompts: float, share: float) -> float:
        """Which share of the mean step's time is neither measured nor between measurements. share: of the steps, that
        have so many tokens of prompts. By the steps of the grid that are nearest."""
        alone = self.price(_nearest(_ALONE, decodes), 0).origins
        beside = self.price(_nearest(_BESIDE, decodes), _nearest(self._anchors.prompts, prompts)).origins
        seconds = {name: (1 - share) * alone[name] + share * beside[name] for name in alone}
        return seconds["analytic"] / sum(seconds.values())

    def seconds(self, decodes: float, prompts: float) -> float:
        """Of a stage; linear between the steps about it."""
        low, high, share = _about(_BESIDE, decodes) if prompts > 0 else _about(_ALONE, decodes)
        below = self._beside(low, prompts)
        return below if share == 0 else below + share * (self._beside(high, prompts) - below)

    def _beside(self, decodes: int, prompts: float) -> float:
        if prompts <= 0:
            return self._stage(decodes, 0)
        first, last, share = _about(self._anchors.prompts, prompts)
        below = self._stage(decodes, first)
        return below if share == 0 else below + share * (self._stage(decodes, last) - below)

    def _stage_seconds(self, decodes: int, prompts: int) -> float:
        price = self.price(decodes, prompts)
        if self._stages == 1:
            return price.seconds
        # What is around a step, and the host, does not shrink with the layers.
        device = (price.on_device - price.around) * self._share + price.around
        seconds = max(device, price.launches * self._share)
        assert self._link is not None
        return seconds + self._link.seconds(1, self._sent * (decodes + prompts)) + _STAGE_SECONDS


def _chunks(tokens: int, prompt: int) -> list[int]:
    """Whole prompts and what is left of the last; of two tokens at least, as one is a decode."""
    whole, rest = divmod(tokens, prompt)
    if whole > MAX_SEQUENCES:  # a step cannot have more
        whole, rest = 1, tokens - prompt
    return [max(2, prompt)] * whole + [max(2, rest)] * bool(rest)


def _about(grid: Sequence[int], value: float) -> tuple[int, int, float]:
    """The neighbours of a value, and how far it is from the first to the second; less than the least counts as that,
    and beyond the grid the last line goes on."""
    value = max(value, grid[0])
    if value >= grid[-1]:
        low, high = grid[-2:]
        return low, high, (value - low) / (high - low)
    at = bisect_left(grid, value)
    if grid[at] == value:
        return grid[at], grid[at], 0.0
    low, high = grid[at - 1], grid[at]
    return low, high, (value - low) / (high - low)


def _nearest(grid: Sequence[int], value: float) -> int:
    return min(grid, key=lambda one: abs(one - value))


def _fullest_stage(config: ModelConfig, stages: int) -> float:
    """Which share of the layers and the head the stage has that has the most."""
    if stages == 1:
        return 1.0
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    experts = config.experts
    width = config.intermediate_size if experts is None else experts.per_token * experts.intermediate_size
    layer = heads + 3 * config.hidden_size * width
    costs = [1.0] * (config.num_layers - 1) + [1.0 + config.vocab_size * config.hidden_size / layer]
    return max(sum(costs[first:end]) for first, end in balance(costs, stages)) / sum(costs)
