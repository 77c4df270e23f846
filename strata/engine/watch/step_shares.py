"""What a step could take at least, what it is predicted to take, and which share of it prompts have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from strata.cost.step_times import StepTimes
from strata.engine.plan import RankPlans, StepPlan
from strata.hardware.roofline import Floor


class StepLook(NamedTuple):
    """prompts: share of the step's time that it takes because of prompts, in [0, 1]. floor: the least that it could
    take; predicted: seconds. Both are None where the device is not known."""

    prompts: float = 0.0
    floor: Floor | None = None
    predicted: float | None = None


NOTHING_KNOWN = StepLook()


@dataclass(frozen=True)
class StepShares:
    """times: how long steps take; without them, shares go by tokens. floors: the least that they could take, as
    `strata.cost.linear.linear_floor` tells it."""

    times: StepTimes | None = None
    floors: Callable[[int, int, int, float], Floor] | None = None

    def look(self, plan: StepPlan) -> StepLook:
        """At one step; at that of ranks with sequences of their own as their longest."""
        if isinstance(plan, RankPlans):
            looks = [self._look(part) for part in plan.parts]
            return max(looks, key=lambda look: look.prompts if look.floor is None else look.floor.seconds)
        return self._look(plan)

    def _look(self, plan: StepPlan) -> StepLook:
        chunks, tokens = plan.chunks, plan.tokens
        only_decodes = tokens == len(chunks)
        if self.times is None and self.floors is None and only_decodes:
            return NOTHING_KNOWN
        prompts = [] if only_decodes else [chunk for chunk in chunks if chunk.count > 1]
        decodes = len(chunks) - len(prompts)
        prompt_keys = sum([chunk.start + chunk.count for chunk in prompts])
        keys = sum([chunk.start for chunk in chunks]) + tokens - prompt_keys
        floor = predicted = None
        if self.floors is not None:
            pairs = keys + sum([chunk.count * (chunk.start + (chunk.count + 1) / 2) for chunk in prompts])
            read = max(0, keys + prompt_keys - plan.shared.repeated)
            floor = self.floors(tokens, len(chunks), read, pairs)
        share = (tokens - decodes) / tokens if tokens else 0.0
        if self.times is not None:
            alone = self.times.decodes(decodes, keys)
            others = alone + sum([self.times.chunk(chunk.start, chunk.count) for chunk in prompts])
            predicted = self.times.total(tokens, others) if prompts else self.times.undivided(tokens, others)
            share = 1.0 if not decodes else max(0.0, 1.0 - self.times.undivided(decodes, alone) / predicted)
        return StepLook(share if prompts else 0.0, floor, predicted)
