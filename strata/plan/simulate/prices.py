"""How long the steps of a simulated engine take, kept by what they have in common: millions can be asked for."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from strata.cache.pages import NONE_SHARED, SharedKeys
from strata.cost.step_model import StepModel
from strata.engine.plan import StepPlan
from strata.hardware.roofline import Workload

# How finely lengths are told apart: an octave in so many parts, between which decode steps lie on a line.
_PARTS = 8
_FIRST = 4 * _PARTS  # below, they would not all be different
# How finely the work of prompts' attention is told apart, and sizes of steps with prompts, which are captured in
# multiples of so many tokens.
_PAIR_PARTS, _TOKENS = 16, 32


class Line(NamedTuple):
    """Seconds of decode steps that read fewer than `upto` keys: base + slope * keys. size: as which they are captured,
    None: launched by the host kernel by kernel."""

    upto: float
    base: float
    slope: float
    size: Hashable | None

    def seconds(self, keys: int) -> float:
        return self.base + self.slope * keys


class StepPrices(Protocol):
    """What steps take, in seconds."""

    def price(self, plan: StepPlan) -> tuple[float, Hashable | None]:
        """Of a step, and the size as which it is captured; decodes as `decodes` has them."""

    def decodes(self, sequences: int, keys: int, shared: SharedKeys = NONE_SHARED) -> Line:
        """Of steps in which so many sequences decode over so many keys in all, their own among them, and more. shared:
        of these keys, or of other sequences that have slots."""


class PredictedPrices:
    """By the cost model of a model on a device. Of decodes the number and the sum of their keys count; of prompts, that
    are taken to be equal, their tokens up to a multiple of 32 and their pairs of queries and keys within 2 %. Of keys
    that sequences share, what their decodes save is taken off.

    copy_seconds: of the fixed states of a sequence, from or to a snapshot.
    """

    def __init__(self, times: StepModel, copy_seconds: float = 0.0) -> None:
        self._times, self._copy_seconds = times, copy_seconds
        self._lines: dict[tuple[int, int], Line] = {}
        self._points: dict[tuple[int, int], float] = {}
        self._mixed: dict[tuple[int, ...], tuple[float, Hashable | None]] = {}

    def price(self, plan: StepPlan) -> tuple[float, Hashable | None]:
        seconds, size = self._computed(plan)
        return seconds + self._copy_seconds * (len(plan.states_before) + len(plan.states_after)), size

    def _computed(self, plan: StepPlan) -> tuple[float, Hashable | None]:
        """Without copies."""
        chunks = plan.chunks
        if plan.tokens == len(chunks):
            keys = sum([chunk.start for chunk in chunks]) + plan.tokens
            line = self.decodes(len(chunks), keys, plan.shared)
            return line.seconds(keys), line.size
        decodes, keys, tokens, pairs, behind = 0, 0, 0, 0, 0
        for chunk in chunks:
            start, count = chunk.start, chunk.count
            if count == 1:
                decodes, keys = decodes + 1, keys + start + 1
            else:
                tokens, pairs = tokens + count, pairs + count * (start + start + count + 1)
                behind += start
        seconds, size = self._priced(decodes, keys, len(chunks) - decodes, tokens, pairs / 2, not behind)
        # What prompts have behind them may be theirs alone, but is taken for repeated. It saves them nothing: their
        # products count, not the way of keys.
        by_decodes = _at_most(plan.shared, plan.shared.repeated - behind, keys)
        return seconds - self._saved(by_decodes, size), size

    def decodes(self, sequences: int, keys: int, shared: SharedKeys = NONE_SHARED) -> Line:
        line = self._unshared(sequences, keys)
        if not shared.repeated:
            return line
        saved = self._saved(_at_most(shared, shared.repeated, keys), line.size)
        return line._replace(base=line.base - saved)

    def _saved(self, shared: SharedKeys, size: Hashable | None) -> float:
        """Seconds, of a step that is captured as `size`. One that the host launches kernel by kernel waits for it."""
        return 0.0 if size is None else self._times.saved(shared.distinct, shared.repeated)

    def _unshared(self, sequences: int, keys: int) -> Line:
        """Where every sequence has keys of its own."""
        step = _place(keys / sequences)
        line = self._lines.get((sequences, step))
        if line is None:
            ends = step, step + 1 if step else _FIRST
            low, high = (sequences * _length(at) for at in ends)
            first, last = (self._point(sequences, at) for at in ends)
            slope = (last - first) / (high - low)
            size = self._times.model.choose(Workload((1,) * sequences, (1,) * sequences)).size
            line = self._lines[sequences, step] = Line(high, first - slope * low, slope, size)
        return line

    def _point(self, sequences: int, step: int) -> float:
        if (sequences, step) not in self._points:
            seconds = self._times.seconds(Workload((1,) * sequences, (_length(step),) * sequences))
            self._points[sequences, step] = seconds
        return self._points[sequences, step]

    def _priced(
        self, decodes: int, keys: int, prompts: int, tokens: int, pairs: float, is_pure_prefill: bool
    ) -> tuple[float, Hashable | None]:
        rounded = -(-(decodes + tokens) // _TOKENS) * _TOKENS - decodes
        step = _place(keys / decodes) if decodes else 0
        work = round(math.log2(pairs) * _PAIR_PARTS)
        key = (decodes, step, prompts, rounded, work, is_pure_prefill)
        found = self._mixed.get(key)
        if found is None:
            each, more = divmod(max(rounded, 2 * prompts), prompts)
            counts = (each + 1,) * more + (each,) * (prompts - more)
            before = 0 if is_pure_prefill else max(1, round(2 ** (work / _PAIR_PARTS) / rounded - (each + 1) / 2))
            workload = Workload(
                (1,) * decodes + counts, (_length(step),) * decodes + tuple(count + before for count in counts)
            )
            seconds = self._times.seconds(workload)
            found = self._mixed[key] = (seconds, self._times.model.choose(workload).size)
        return found


def _place(length: float) -> int:
    """Of the last length that is asked for and is no more than this one: 1, or one from 2 ** (_FIRST / _PARTS) on."""
    return int(math.log2(length) * _PARTS + 1e-9) if length >= _length(_FIRST) else 0


def _at_most(shared: SharedKeys, repeated: int, keys: int) -> SharedKeys:
    """Of shared keys so many repeated ones, of so many keys."""
    return shared._replace(repeated=max(0, min(repeated, keys)))


def _length(place: int) -> int:
    return round(2 ** (place / _PARTS))
