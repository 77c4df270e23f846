"""How long a step will take, told from what it runs, so that prompts make no step too long for those who decode: the
linear form of `strata.cost.step_model`, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# What a message between ranks takes longer than its way over the link, because its kernel begins and meets the others;
# and what large ones reach of the link's bandwidth: 3.5 us for 64 KiB in a CUDA graph, 245 us for 64 MiB by NCCL
# between two H200.
MESSAGE_SECONDS = 2e-6
LINK = 0.8


@dataclass(frozen=True)
class ShardingTimes:
    """What the times of steps become where `ranks` that hold a model alike divide their tokens: a part of the products
    and of what else follows from tokens, sequences and keys, and messages.

    least: tokens of the shortest step that they divide. message: seconds of all messages of a step. token: of what they
    carry for a token of another rank. captured: tokens of the largest that is replayed, 0 if none is.
    """

    ranks: int
    least: int
    message: float
    token: float
    captured: int = 0

    def total(self, whole: StepTimes, tokens: int, others: float) -> float:
        """Seconds of a step of so many tokens, which takes one rank `others` beside weights and products."""
        if tokens < self.least:
            return math.inf
        return self._part(whole).undivided(tokens, others / self.ranks + self._sent * tokens)

    def longest(self, whole: StepTimes, seconds: float, tokens: int, others: float, start: int) -> int:
        """As `StepTimes.longest` has it; 0 if the step would be too short to be divided."""
        given = others / self.ranks + self._sent * tokens
        longest = self._part(whole).longest(seconds, tokens, given, start)
        return longest if tokens + longest >= self.least else 0

    @property
    def _sent(self) -> float:
        """Of each token of a step, which all other ranks get: seconds of the link."""
        return self.token * (self.ranks - 1) / self.ranks

    def _part(self, whole: StepTimes) -> StepTimes:
        """Of a rank's part of the step, by the tokens of the whole. Nothing is sent beside products there."""
        shares = {name: getattr(whole, name) / self.ranks for name in ("product", "sequence", "key", "pair")}
        return replace(
            whole,
            **shares,
            step=whole.step + whole.prompts + self.message,
            token=whole.token / self.ranks + self._sent,
            captured=self.captured,
            overlapped=0,
            hidden=0.0,
            division=None,
            prompts=0.0,
        )


@dataclass(frozen=True)
class StepTimes:
    """What a step of a model takes on a device, in seconds. Times of a step:

        step + max(read, product * tokens) + token * tokens + sequence * sequences + key * keys + pair * pairs
        read = weights - experts * unused ** tokens

    and `prompts`, if it has any; less `hidden` * tokens if there are `overlapped` or more and that is not 0; or
    `launch`, if that is longer and there are more than `captured` tokens.

    keys: tokens of the sequences once the step has run, whose keys and values it reads. pairs: of queries and keys, of
    prompts alone, since decoding takes the time to read the keys. All of these seven are positive.

    step: whatever runs, messages between ranks too, of whatever size. weights: to read them once. experts: of these, in
    mixtures of which a token leaves the share `unused` alone. product: of one token
    with all weights. token: its activations' ways through memory, its part of messages, and attention in layers with a
    window. sequence: its sampled row, and the keys of a window.
    captured: tokens of the largest step with prompts that is replayed. launch: of larger ones, by the host, beside the
    device. overlapped: tokens from which messages travel beside products. hidden: of a token's part of them.
    division: of steps that ranks divide where that takes less time. prompts: of a step that has some, however long.
    """

    step: float
    weights: float
    product: float
    token: float
    sequence: float
    key: float
    pair: float
    captured: int = 0
    launch: float = 0.0
    overlapped: int = 0
    hidden: float = 0.0
    division: ShardingTimes | None = None
    prompts: float = 0.0
    experts: float = 0.0
    unused: float = 0.0

    def decodes(self, sequences: int, keys: int) -> float:
        """Seconds of sequences with a token each, beside weights and products."""
        return (self.token + self.sequence) * sequences + self.key * keys

    def chunk(self, start: int, count: int) -> float:
        """Seconds of so many tokens of a prompt behind the first `start`, beside weights and products."""
        pairs = count * (start + (count + 1) / 2)
        return self.token * count + self.sequence + self.key * (start + count) + self.pair * pairs

    def prompt(self, start: int, count: int) -> float:
        """Seconds of so many tokens of a prompt behind the first `start` in steps that are full of prompts."""
        seconds = self.chunk(start, count) + self.product * count
        return seconds if self.division is None else seconds / self.division.ranks

    def overhead(self, decodes: int, others: float) -> float:
        """Seconds of a step with so many decodes, which take `others`, that serve no prompt beside them."""
        return self.step + self.prompts + self.product * decodes + others

    def total(self, tokens: int, others: float) -> float:
        """Seconds of a step with prompts, of so many tokens that take `others` beside weights and products."""
        undivided = self.undivided(tokens, others + self.prompts)
        return undivided if self.division is None else min(undivided, self.division.total(self, tokens, others))

    def undivided(self, tokens: int, others: float) -> float:
        """The same of a step all of which each rank runs, as of all that have decodes alone."""
        read = self.weights - self.experts * self.unused**tokens
        on_device = self.step + max(read, self.product * tokens) + others
        if self._is_overlapped(tokens):
            on_device -= self.hidden * tokens
        return on_device if tokens <= self.captured else max(on_device, self.launch)

    def longest(self, seconds: float, tokens: int, others: float, start: int) -> int:
        """Tokens of the longest chunk behind `start` with which a step that has (tokens, others) takes `seconds`."""
        most = math.inf if seconds >= self.launch else max(0, self.captured - tokens)
        longest = min(self._longest(seconds, tokens, others, start, self.hidden), most)
        if not self._is_overlapped(tokens + int(longest)):
            longest = min(self._longest(seconds, tokens, others, start, 0.0), most)
        divided = 0 if self.division is None else self.division.longest(self, seconds, tokens, others, start)
        return max(int(longest), divided)

    def _is_overlapped(self, tokens: int) -> bool:
        return 0 < self.overlapped <= tokens

    def _longest(self, seconds: float, tokens: int, others: float, start: int, hidden: float) -> int:
        left = seconds - self.step - self.prompts - others - self.sequence - self.key * start + hidden * tokens
        linear = self.token + self.key + self.pair * (start + 0.5) - hidden
        by_weights = _root(self.pair / 2, linear, left - self.weights)
        by_products = _root(self.pair / 2, linear + self.product, left - self.product * tokens)
        return int(min(by_weights, by_products))


def _root(square: float, linear: float, bound: float) -> float:
    """The x of at least 0 up to which square * x**2 + linear * x stays within a bound; 0 if there is none."""
    return 2 * bound / (linear + math.sqrt(linear**2 + 4 * square * bound)) if bound > 0 else 0.0
