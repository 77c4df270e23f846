"""How much of the engine each caller may use, how many requests may wait, and when a refused one should come again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from strata.serve.http.errors import ApiError
from strata.serve.settings import ServeSettings
from strata.text.counted import counted

_LONGEST_DRAIN = 60.0  # seconds; the rate of the last releases says little about later
_RELEASES_REMEMBERED = 64
_REST = 4.0  # times what the work took; so one caller takes a fifth of the loop at most


@dataclass(frozen=True)
class Caller:
    """Whom a request comes from.

    name: of its key, for logs and limits. salt: only requests of the same salt share cached prefixes.
    """

    name: str
    salt: str


class TokenBucket:
    """An allowance per minute: at most a minute's worth is in it, and it refills steadily. Times are in seconds."""

    def __init__(self, per_minute: float | None, now: float) -> None:
        """per_minute: None for no bound."""
        self.capacity = math.inf if per_minute is None else max(1.0, per_minute)
        self._rate = 1.0 if per_minute is None else per_minute / 60.0  # any rate fills what has no bound
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

    requests: TokenBucket
    tokens: TokenBucket
    in_flight: int = 0


class Limits:
    """Says of requests whether and when they may come in: first at the door, then for what they would cost.

    A sequence is in flight from its admission to its release; a request has one for each of its samples. The engine
    runs `max_sequences` at once, so what is in flight beyond that waits, and `settings.max_queue` bounds it. Of several
    API processes each has an equal share of every bound. `clock` tells seconds.

    callers: how many there are. Where there are several, one that fills the queue leaves as much room as it takes.
    """

    def __init__(
        self, settings: ServeSettings, max_sequences: int, callers: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._settings = settings
        workers = settings.api_workers
        self._runnable = max(1, max_sequences // workers)
        self._max_in_flight = self._runnable + settings.max_queue // workers
        self._max_of_caller = None if settings.concurrency is None else max(1, settings.concurrency // workers)
        self.set_callers(callers)
        self._allowances: dict[str, _Allowance] = {}
        self._releases: deque[float] = deque(maxlen=_RELEASES_REMEMBERED)
        self._in_flight = 0

    def set_callers(self, callers: int) -> None:
        """There are so many from now on."""
        self._shared = callers > 1

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Sequences in flight beyond those that the engine runs at once."""
        return max(0, self._in_flight - self._runnable)

    @property
    def max_concurrent(self) -> int:
        """Sequences that one request may have in flight."""
        return min(self._max_in_flight, self._max_of_caller or self._max_in_flight)

    def enter(self, caller: Caller) -> None:
        """Count a request before anything is done for it, its body not even read; it counts whatever becomes of it.

        Raises ApiError: 429 or 503, as `admit`, if no request of the caller could be admitted now. One that is turned
        away for the rate of requests does not count, so that its Retry-After is true.
        """
        now = self._clock()
        allowance = self._allowance(caller, now)
        self._check_requests(allowance.requests, 1, now)
        allowance.requests.take(1.0, now)
        self._check_sequences(allowance, 1, now)

    def admit(
        self,
        caller: Caller,
        prompt_tokens: int,
        token_limit: int,
        sequences: int = 1,
        *,
        requests: int = 1,
        arrival: float | None = None,
    ) -> AdmittedRequest:
        """Give a request room for all its sequences, or none, until its `AdmittedRequest` is released.

        prompt_tokens: an estimate, before the prompts are made. token_limit: the most that each of its `sequences` can
            generate. They are reserved in the caller's tokens per minute together with the prompts, up to a full
            minute's worth; what was not used is given back in the end.
        requests: how many it counts as; one of them was counted by `enter`. arrival: by default now.
        Raises ApiError: 429 if the caller is over its own limits and 503 if too many requests wait, both with
        Retry-After and a code that names the bound; 400 if the request could never be admitted. Nothing is taken then.
        """
        now = self._clock()
        allowance = self._allowance(caller, now)
        most = self.max_concurrent
        if sequences > most:
            message = f"{sequences} sequences are more than may run at once here, {most}: send them in several requests"
            raise ApiError(400, message, param="n", code="too_many_sequences")
        if requests > allowance.requests.capacity:
            bound = f"this key may use {allowance.requests.capacity:g} a minute: send it in parts"
            raise ApiError(400, f"this counts as {requests} requests, and {bound}", code="too_many_requests")
        tokens = float(prompt_tokens + sequences * token_limit)
        reserved = min(tokens, allowance.tokens.capacity)
        self._check_sequences(allowance, sequences, now)
        self._check_requests(allowance.requests, requests - 1, now)
        if (wait := allowance.tokens.wait(reserved, now)) > 0:
            bound = f"{self._settings.tokens_per_minute} tokens per minute (this request may take {reserved:.0f})"
            raise _over(bound, "tokens_per_minute", wait)
        allowance.requests.take(requests - 1, now)
        allowance.tokens.take(reserved, now)
        allowance.in_flight += sequences
        self._in_flight += sequences
        start = now if arrival is None else arrival
        return AdmittedRequest(
            caller=caller,
            arrival=start,
            deadline=start + self._settings.request_timeout,
            sequences=sequences,
            tokens=allowance.tokens,
            clock=self._clock,
            held=reserved,
            prompt=prompt_tokens,
            max_output=sequences * token_limit,
            free=lambda sequences: self._free(allowance, sequences),
        )

    def _allowance(self, caller: Caller, now: float) -> _Allowance:
        found = self._allowances.get(caller.name)
        if found is None:
            bounds = (self._settings.requests_per_minute, self._settings.tokens_per_minute)
            shares = (None if bound is None else bound / self._settings.api_workers for bound in bounds)
            requests, tokens = (TokenBucket(share, now) for share in shares)
            found = self._allowances[caller.name] = _Allowance(requests, tokens)
        return found

    def _check_sequences(self, allowance: _Allowance, sequences: int, now: float) -> None:
        if self._max_of_caller is not None and allowance.in_flight + sequences > self._max_of_caller:
            raise _over(f"{self._settings.concurrency} sequences at once", "concurrency", self._drain_time(now))
        free = self._max_in_flight - self._in_flight
        kept_for_others = self._shared and allowance.in_flight + sequences > self._runnable + free
        if sequences > free or kept_for_others:
            whose = f", {allowance.in_flight} of them of this key" if kept_for_others else ""
            message = f"the server is overloaded, {counted(self.waiting, 'sequence')} in line{whose}: try again later"
            raise ApiError(503, message, code="queue_full", headers=_retry_after(self._drain_time(now)))

    def _check_requests(self, bucket: TokenBucket, requests: int, now: float) -> None:
        if (wait := bucket.wait(requests, now)) > 0:
            raise _over(f"{self._settings.requests_per_minute} requests per minute", "requests_per_minute", wait)

    def _free(self, allowance: _Allowance, sequences: int) -> None:
        allowance.in_flight -= sequences
        self._in_flight -= sequences
        self._releases.extend([self._clock()] * sequences)

    def _drain_time(self, now: float) -> float:
        """Seconds in which what waits would be gone at the rate of the last releases."""
        if not self._releases or now <= self._releases[0]:
            return 1.0
        return min(_LONGEST_DRAIN, (self.waiting + 1) * (now - self._releases[0]) / len(self._releases))


@dataclass(eq=False)
class AdmittedRequest:
    """A request that was let in. `close` it when it is over, however it ends.

    caller: whose it is. arrival, deadline: seconds of `time.monotonic()` between which it is to be answered.
    sequences: those that have not ended, of which `free` gives room back. tokens: its caller's, of which it holds
        `held`. prompt: tokens, at first estimated.
    max_output, output: tokens that it may generate, and those of the sequences that have ended.
    """

    caller: Caller
    arrival: float
    deadline: float
    sequences: int
    tokens: TokenBucket
    clock: Callable[[], float]
    held: float
    prompt: float
    max_output: float
    free: Callable[[int], None]
    is_estimate: bool = True
    output: int = 0

    def add_prompt(self, tokens: int) -> None:
        """One of its prompts has so many tokens. What all have takes the place of the estimate."""
        self.prompt = tokens if self.is_estimate else self.prompt + tokens
        self.is_estimate = False
        self._hold(min(self.prompt + self.max_output, self.tokens.capacity))  # no more than a full minute's worth

    def release(self, sequences: int, output_tokens: int) -> None:
        """So many of its sequences have ended, after so many tokens in all; their room is free."""
        sequences = min(sequences, self.sequences)
        if sequences == 0:
            return
        self.sequences -= sequences
        self.output += output_tokens
        self.free(sequences)
        if self.sequences == 0:
            self._hold(self.prompt + self.output)

    def close(self) -> None:
        """Release what it still has. A second call has no effect."""
        self.release(self.sequences, 0)

    def _hold(self, tokens: float) -> None:
        """It holds so many, more or fewer than until now."""
        self.tokens.take(tokens - self.held, self.clock())
        self.held = tokens

    def timed_out(self) -> ApiError:
        """What it is answered with once its deadline has passed."""
        seconds = self.deadline - self.arrival
        return ApiError(
            408,
            f"the request was not done after {seconds:g} s, the most that this server gives one; ask for less",
            code="timeout",
            headers={"x-should-retry": "false"},  # what clients do with 408 by themselves would only repeat it
        )


def _over(bound: str, code: str, wait: float) -> ApiError:
    message = f"rate limit reached: this key may use {bound}"
    return ApiError(429, message, code=code, headers=_retry_after(wait))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


class LoopShare:
    """One caller's work items are done one after the other, with the loop left to others between them."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = {}
        self._rested: dict[str, float] = {}  # when a caller's next piece may be done

    @asynccontextmanager
    async def time_slice(self, caller: str) -> AsyncIterator[None]:
        """Do one item of work inside, all at once; a caller's own wait in the order in which they came."""
        async with self._turns.setdefault(caller, asyncio.Lock()):
            await asyncio.sleep(max(0.0, self._rested.get(caller, 0.0) - time.monotonic()))
            began = time.monotonic()
            try:
                yield
            finally:
                now = time.monotonic()
                self._rested[caller] = now + _REST * (now - began)
