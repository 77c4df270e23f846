"""Engines that compute prompts alone and hand them to others that decode. Strata does not serve so yet: a simulation
of what that would bring."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from strata.cache.pages import NONE_SHARED, SharedKeys
from strata.engine.plan import StepPlan
from strata.plan.simulate.prices import Line, StepPrices
from strata.plan.simulate.replica import EngineShape


@dataclass(frozen=True)
class Handover:
    """prefill: engines that compute prompts; the others decode. latency: seconds until a transfer begins. kv_bytes: of
    keys and values of a token, all layers. bandwidth: bytes/s with which they travel."""

    prefill: int
    latency: float
    kv_bytes: int
    bandwidth: float

    def seconds(self, tokens: int) -> float:
        """Of the keys and values of so many tokens, sent once the prompt is computed."""
        return self.latency + tokens * self.kv_bytes / self.bandwidth


@dataclass(frozen=True)
class _ReceivedPrices:
    """Where keys and values of prompts are sent, not computed: what looks like a prompt is the decode step behind it.
    One that was preempted is sent again as well, in no time."""

    computed: StepPrices

    def price(self, plan: StepPlan) -> tuple[float, Hashable | None]:
        keys = sum([chunk.start + chunk.count for chunk in plan.chunks])
        line = self.decodes(len(plan.chunks), keys, plan.shared)
        return line.seconds(keys), line.size

    def decodes(self, sequences: int, keys: int, shared: SharedKeys = NONE_SHARED) -> Line:
        return self.computed.decodes(sequences, keys, shared)


def received_prices(prices: StepPrices) -> StepPrices:
    """Of an engine that decodes alone."""
    return _ReceivedPrices(prices)


def received_shape(shape: EngineShape) -> EngineShape:
    """Of an engine that decodes alone: no prompt is ever divided, and none is looked up."""
    tokens = shape.num_pages * shape.page_size
    scheduler = replace(shape.scheduler, max_tokens=max(tokens, shape.scheduler.max_tokens), target=None)
    return replace(shape, scheduler=scheduler, caches=False)
