"""How much of the engine each caller may use, how many requests may wait, and when a refused one should come again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from strata.serve.http.errors import ApiError
from strata.serve.settings import ServeSettings

_LONGEST_DRAIN = 60.0  # seconds; the rate of the last releases says little about later
_RELEASES_REMEMBERED = 64


@dataclass(frozen=True)
class Caller:
    """Whom a request comes from.

    name: of its key, for logs and limits. salt: only requests of the same salt share cached prefixes.
    """

    name: str
    salt: str


class Bucket:
    """An allowance per minute: at most a minute's worth is in it, and it refills steadily. Times are in seconds."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.capacity = max(1.0, per_minute)
        self._rate = per_minute / 60.0
        self._level = self.capacity
        self._filled = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount`, of no more than the capacity, can be taken; 0 if it can be now."""
        self._refill(now)
        return max(0.0, (amount - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, or give back what is negative. More than is there leaves a debt, which refilling pays."""
        self._refill(now)
        self._level = min(self.capacity, self._level - amount)

    def _refill(self, now: float) -> None:
        self._level = min(self.capacity, self._level + (now - self._filled) * self._rate)
        self._filled = now


@dataclass
class _Allowance:
    """What one caller may still use, and how many of its sequences are in flight."""

    requests: Bucket | None
    tokens: Bucket | None
    in_flight: int = 0


class Limits:
    """Admits requests to the engine, or says why not and when to come again.

    A sequence is in flight from its admission to its release; a request has one for each of its samples. The engine
    runs `max_sequences` at once, so what is in flight beyond that waits, and `settings.max_queue` bounds it. Of several
    API processes each has an equal share of every bound. `clock` tells seconds.
    """

    def __init__(
        self, settings: ServeSettings, max_sequences: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._settings = settings
        workers = settings.api_workers
        self._runnable = max(1, max_sequences // workers)
        self._most_in_flight = self._runnable + settings.max_queue // workers
        self._most_of_caller = None if settings.concurrency is None else max(1, settings.concurrency // workers)
        self._allowances: dict[str, _Allowance] = {}
        self._releases: deque[float] = deque(maxlen=_RELEASES_REMEMBERED)
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Sequences in flight beyond those that the engine runs at once."""
        return max(0, self._in_flight - self._runnable)

    def admit(self, caller: Caller, prompt_tokens: int, most_tokens: int, sequences: int = 1) -> Admission:
        """Count a request in until its `Admission` is released.

        most_tokens: the most that each of its `sequences` can generate. They are reserved in the caller's tokens per
            minute together with the prompt, up to a full minute's worth; what was not used is given back in the end.
        Raises ApiError: 429 if the caller is over its own limits and 503 if too many requests wait, both with
        Retry-After and a code that names the bound; 400 if the request could never be admitted.
        """
        now = self._clock()
        allowance = self._allowances.get(caller.name)
        if allowance is None:
            allowance = self._allowances[caller.name] = self._full_allowance(now)
        most = min(self._most_in_flight, self._most_of_caller or self._most_in_flight)
        if sequences > most:
            raise ApiError(400, f"{sequences} sequences are more than may run at once here: {most}", param="n")
        tokens = float(prompt_tokens + sequences * most_tokens)
        reserved = 0.0 if allowance.tokens is None else min(tokens, allowance.tokens.capacity)
        self._check_allowance(allowance, sequences, reserved, now)
        if self._in_flight + sequences > self._most_in_flight:
            message = f"the server is overloaded, {self.waiting} sequences wait: try again later"
            raise ApiError(503, message, code="queue_full", headers=_retry_after(self._drain_time(now)))
        if allowance.requests is not None:
            allowance.requests.take(1.0, now)
        if allowance.tokens is not None:
            allowance.tokens.take(reserved, now)
        allowance.in_flight += sequences
        self._in_flight += sequences

        def settle(output_tokens: int) -> None:
            self._settle(allowance, sequences, reserved - prompt_tokens - output_tokens)

        return Admission(settle)

    def _full_allowance(self, now: float) -> _Allowance:
        def bucket(per_minute: int | None) -> Bucket | None:
            return None if per_minute is None else Bucket(per_minute / self._settings.api_workers, now)

        return _Allowance(bucket(self._settings.requests_per_minute), bucket(self._settings.tokens_per_minute))

    def _check_allowance(self, allowance: _Allowance, sequences: int, reserved: float, now: float) -> None:
        if self._most_of_caller is not None and allowance.in_flight + sequences > self._most_of_caller:
            raise _over(f"{self._settings.concurrency} sequences at once", "concurrency", self._drain_time(now))
        if allowance.requests is not None and (wait := allowance.requests.wait(1.0, now)) > 0:
            raise _over(f"{self._settings.requests_per_minute} requests per minute", "requests_per_minute", wait)
        if allowance.tokens is not None and (wait := allowance.tokens.wait(reserved, now)) > 0:
            bound = f"{self._settings.tokens_per_minute} tokens per minute (this request may take {reserved:.0f})"
            raise _over(bound, "tokens_per_minute", wait)

    def _settle(self, allowance: _Allowance, sequences: int, unused: float) -> None:
        now = self._clock()
        allowance.in_flight -= sequences
        self._in_flight -= sequences
        self._releases.extend([now] * sequences)
        if allowance.tokens is not None:
            allowance.tokens.take(-unused, now)

    def _drain_time(self, now: float) -> float:
        """Seconds in which what waits would be gone at the rate of the last releases."""
        if not self._releases or now <= self._releases[0]:
            return 1.0
        return min(_LONGEST_DRAIN, (self.waiting + 1) * (now - self._releases[0]) / len(self._releases))


class Admission:
    """A request that was let in. Release it when it ends, however it ends."""

    def __init__(self, settle: Callable[[int], None]) -> None:
        self._settle: Callable[[int], None] | None = settle

    def release(self, output_tokens: int) -> None:
        """Settle what was reserved against the tokens of all its samples. A second call has no effect."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(output_tokens)


def _over(bound: str, code: str, wait: float) -> ApiError:
    message = f"rate limit reached: this key may use {bound}"
    return ApiError(429, message, code=code, headers=_retry_after(wait))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
