"""Routes requests to replicas of an engine: a value in, a value out, without sockets, clocks or tasks. Which prefixes a
replica holds follows from the prompts that it was sent."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from itertools import takewhile

import numpy as np

# Tokens that are told apart by one key: several pages, so that a prompt of 128k tokens has few enough of them.
BLOCK_TOKENS = 64
_KEY_BYTES = 16


def prefix_keys(prompt: Sequence[int], salt: str = "") -> list[bytes]:
    """A key for every full block of a prompt, of all tokens up to the block's end and of the salt.

    At least one token is left over, as in the engine's prefix cache: something must be computed to sample from.
    Raises OverflowError for a number outside [-2^63, 2^63).
    """
    try:
        numbers = array("I", prompt)
    except OverflowError:  # some stand for other content than text
        numbers = array("q", prompt)
    ids, width = memoryview(numbers).cast("B"), BLOCK_TOKENS * numbers.itemsize
    # Of the salt a digest of fixed length, so that no salt and tokens read like another salt and other tokens.
    hashed = blake2b(blake2b(salt.encode()).digest(), digest_size=_KEY_BYTES)
    keys = []
    for block in range((len(prompt) - 1) // BLOCK_TOKENS):
        hashed.update(ids[block * width : (block + 1) * width])
        keys.append(hashed.digest())
    return keys


class CachedPrefixes:
    """An approximation from what was routed alone: at most as many blocks as the replica has room for, of which those
    not asked for longest are forgotten first, the end of a prompt before its beginning.

    The engine evicts in the same order, but its pages hold what was generated too; so it may hold less than this says.
    """

    def __init__(self, max_blocks: int) -> None:
        self._most = max_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Blocks."""
        return len(self._keys)

    def matched(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks are held, counted from its beginning."""
        return sum(1 for _ in takewhile(self._keys.__contains__, keys))

    def note(self, keys: Sequence[bytes]) -> list[bytes]:
        """The replica is sent a prompt of these blocks; returns those that are forgotten for them."""
        for key in reversed(keys[: self._most]):
            self._keys[key] = None
            self._keys.move_to_end(key)
        return [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._most)]

    def clear(self) -> None:
        """The replica has lost its cache."""
        self._keys.clear()


# What a sample weighs beside tokens of prompts that are to be computed: a guess at the length of an answer, since a
# token that is decoded in a batch takes about as long as one of a prompt, or less.
SAMPLE_TOKENS = 256
# A request that was under way in so many replicas that were lost may be why; no further one is risked.
MAX_REPLICAS = 2
# Stands for the load of a replica that takes no requests.
_TAKES_NONE = np.iinfo(np.int64).max


class NoReplica(RuntimeError):
    """No replica takes the request; the message says why, in one line."""


class ReplicaState(Enum):
    """serving: takes requests. draining: finishes those it has and takes no others. lost: has none, and takes none."""

    SERVING = "serving"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, eq=False)
class Route:
    """A request's way to a replica.

    prompt_tokens: to be computed there, as far as is known. samples: sequences that decode.
    matched_tokens: of the prompt's beginning, which the replica should hold.
    attempt: 1 for the first replica that got the request.
    """

    replica: int
    prompt_tokens: int
    matched_tokens: int
    samples: int
    attempt: int


@dataclass(slots=True)
class _Replica:
    """prompt_tokens, samples: of the routes that lead here, those begun without their prompts. reported: the load that
    the engine told of, and own_when_reported what the routes amounted to then."""

    held: CachedPrefixes
    standing: ReplicaState = ReplicaState.SERVING
    routes: dict[Route, int] = field(default_factory=dict)  # each with its prompt tokens that are still to be computed
    prompt_tokens: int = 0
    samples: int = 0
    reported: int = 0
    own_when_reported: int = 0

    @property
    def own(self) -> int:
        return self.prompt_tokens + SAMPLE_TOKENS * self.samples

    @property
    def load(self) -> int:
        return max(self.own, self.reported + self.own - self.own_when_reported)

    def remove(self, route: Route) -> None:
        self.prompt_tokens -= self.routes.pop(route)
        self.samples -= route.samples


class Router:
    """The replica that gets a request is the one with the least

        load + tokens of the prompt that it would have to compute,

    in tokens, where the load is that of the requests under way: tokens of their prompts still to be computed, and
    SAMPLE_TOKENS for each sample. So a request follows its prefix until the replica that holds it has more load than
    another by what the prefix saves, and right before a choice the chosen one has at most `Route.matched_tokens` more
    load than any other. Of equal ones the one that holds the longer prefix is taken, then they take turns.

    The cost is that of NVIDIA Dynamo's KV router (prompt blocks to compute plus blocks under way). As in SGLang's
    cache-aware router the prefixes are learned from what was routed, not told by the engines; its two thresholds, which
    switch between prefix and load, have no counterpart in a sum. All replicas are compared: the power of two choices
    (Mitzenmacher 2001) saves asking many for their loads, and here the loads are known.

    Several routers may send to the same engines (one in each API process). Each knows its own requests, and by `report`
    how much load there is in all; between two reports it does not see what the others do.
    """

    def __init__(self, capacities: Iterable[int]) -> None:
        """capacities: for each replica, the tokens that its KV cache has room for."""
        self._replicas = [_Replica(CachedPrefixes(capacity // BLOCK_TOKENS)) for capacity in capacities]
        # Beside what the replicas know, so that a choice among a thousand need not ask each: the loads of those that
        # serve, and by the first block of a prompt those that hold it.
        self._loads = np.zeros(len(self._replicas), np.int64)
        self._holders: dict[bytes, set[int]] = {}
        self._turn = 0

    def __len__(self) -> int:
        """Replicas, in whatever standing."""
        return len(self._replicas)

    def standing(self, replica: int) -> ReplicaState:
        return self._replicas[replica].standing

    def load(self, replica: int) -> int:
        """In tokens; see the class."""
        return self._replicas[replica].load

    def under_way(self, replica: int) -> int:
        """Requests that this router has sent there and that have not ended."""
        return len(self._replicas[replica].routes)

    def cached_blocks(self, replica: int) -> int:
        """Blocks of BLOCK_TOKENS that the replica is thought to hold."""
        return len(self._replicas[replica].held)

    def route(self, prompt: Sequence[int], salt: str = "", *, samples: int = 1, caches: bool = True) -> Route:
        """Choose a replica; until `ended` is told, the request counts as its load.

        salt: prompts of different salts share nothing. samples: sequences that decode; 0 for an embedding.
        caches: whether the prompt is looked up in the engine's prefix cache and kept there.
        Raises NoReplica if none serves.
        """
        return self._route(prompt, salt, samples, caches, attempt=1)

    def reroute(
        self, route: Route, prompt: Sequence[int], salt: str = "", *, samples: int = 1, caches: bool = True
    ) -> Route:
        """Another replica for a request of which nothing was sent on when its replica was lost. Parameters as of
        `route`. Raises NoReplica as well when the request has had MAX_REPLICAS."""
        if route.attempt >= MAX_REPLICAS:
            raise NoReplica(f"{route.attempt} engines have ended while they had the request")
        return self._route(prompt, salt, samples, caches, attempt=route.attempt + 1)

    def begun(self, route: Route) -> None:
        """The request has its first token: its prompt is computed."""
        replica = self._replicas[route.replica]
        if route in replica.routes:
            replica.prompt_tokens -= replica.routes[route]
            replica.routes[route] = 0
            self._note(route.replica)

    def ended(self, route: Route) -> None:
        """The request is over, whichever way. No effect the second time, nor after its replica was lost."""
        replica = self._replicas[route.replica]
        if route in replica.routes:
            replica.remove(route)
            self._note(route.replica)

    def report(self, replica: int, *, prompt_tokens: int, samples: int) -> None:
        """What an engine tells of all requests under way in it, whoever sent them: tokens of prompts still to be
        computed, and sequences."""
        one = self._replicas[replica]
        one.reported = prompt_tokens + SAMPLE_TOKENS * samples
        one.own_when_reported = one.own
        self._note(replica)

    def drain(self, replica: int) -> None:
        """The replica takes no new requests. No effect on one that is lost."""
        one = self._replicas[replica]
        if one.standing is ReplicaState.SERVING:
            one.standing = ReplicaState.DRAINING
            self._note(replica)

    def lose(self, replica: int) -> list[Route]:
        """The replica's engine has ended: with it went what it held and the requests under way, which are returned."""
        one = self._replicas[replica]
        lost = list(one.routes)
        for route in lost:
            one.remove(route)
        one.held.clear()
        self._holders = {key: holders for key, old in self._holders.items() if (holders := old - {replica})}
        one.reported = one.own_when_reported = 0
        one.standing = ReplicaState.LOST
        self._note(replica)
        return lost

    def recover(self, replica: int) -> None:
        """The replica serves again: after a drain with what it has, after a loss with a new engine that is empty."""
        self._replicas[replica].standing = ReplicaState.SERVING
        self._note(replica)

    def _note(self, replica: int) -> None:
        """The load or the standing of a replica has changed."""
        one = self._replicas[replica]
        self._loads[replica] = one.load if one.standing is ReplicaState.SERVING else _TAKES_NONE

    def _route(self, prompt: Sequence[int], salt: str, samples: int, caches: bool, attempt: int) -> Route:
        least = int(self._loads.min())
        if least == _TAKES_NONE:
            standings = ", ".join(f"{number} is {one.standing.value}" for number, one in enumerate(self._replicas))
            raise NoReplica(f"no engine takes requests: {standings}")
        keys = prefix_keys(prompt, salt) if caches else []
        # Only those that hold the beginning have a cost of less than their load; of the others the next in turn of
        # those with the least is enough.
        holders = [number for number in self._holders.get(keys[0], ()) if self._serves(number)] if keys else ()
        matched = {number: BLOCK_TOKENS * self._replicas[number].held.matched(keys) for number in holders}
        idlest = np.flatnonzero(self._loads == least)
        after = int(np.searchsorted(idlest, self._turn))
        next_in_turn = int(idlest[after if after < len(idlest) else 0])

        def cost(number: int) -> tuple[int, int, int]:
            turns = (number - self._turn) % len(self._replicas)
            found = matched.get(number, 0)
            return self._replicas[number].load - found, -found, turns

        chosen = min({*matched, next_in_turn}, key=cost)
        self._turn = chosen + 1
        replica = self._replicas[chosen]
        found = matched.get(chosen, 0)
        route = Route(chosen, len(prompt) - found, found, samples, attempt)
        self._hold(chosen, keys)
        replica.routes[route] = route.prompt_tokens
        replica.prompt_tokens += route.prompt_tokens
        replica.samples += samples
        self._note(chosen)
        return route

    def _serves(self, replica: int) -> bool:
        return self._replicas[replica].standing is ReplicaState.SERVING

    def _hold(self, replica: int, keys: Sequence[bytes]) -> None:
        """A replica is sent a prompt of these blocks."""
        forgotten = self._replicas[replica].held.note(keys)
        if self._replicas[replica].held.matched(keys[:1]):
            self._holders.setdefault(keys[0], set()).add(replica)
        for key in forgotten:
            holders = self._holders.get(key)
            if holders is not None:
                holders.discard(replica)
                if not holders:
                    del self._holders[key]
