"""Which replica gets a request, and what is known of the prefixes that each has."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strata.engine.routing.router import (
    BLOCK_TOKENS,
    MAX_REPLICAS,
    SAMPLE_TOKENS,
    CachedPrefixes,
    NoReplica,
    ReplicaState,
    Route,
    Router,
    prefix_keys,
)

_ROOM = 100_000


def _prompt(document: int, blocks: int, question: int = 0) -> list[int]:
    """A document of so many blocks and a question of 8 tokens."""
    return [document] * (blocks * BLOCK_TOKENS) + [1000 + question] * 8


def test_requests_follow_their_prefix_until_it_saves_less_than_the_load_costs() -> None:
    router = Router([_ROOM, _ROOM])
    first = router.route(_prompt(1, 32))
    assert first.matched_tokens == 0
    router.begun(first)
    homes = []
    for question in range(40):
        route = router.route(_prompt(1, 32, question))
        router.begun(route)
        homes.append(route.replica)
    # By hand: the document saves 2048 tokens, and a sample weighs 256; so 8 more than the other has are borne, and the
    # one that finds them equal still goes where the prefix is.
    together = 32 * BLOCK_TOKENS // SAMPLE_TOKENS
    assert homes[:together] == [first.replica] * together
    assert homes[together] != first.replica
    counts = Counter(homes[together:])
    assert abs(counts[0] - counts[1]) <= together + 1


def test_idle_replicas_take_turns() -> None:
    router = Router([_ROOM] * 3)
    taken = []
    for number in range(6):
        route = router.route([number])
        router.ended(route)
        taken.append(route.replica)
    assert taken == [0, 1, 2, 0, 1, 2]


def test_salts_share_no_prefix() -> None:
    router = Router([_ROOM, _ROOM])
    router.ended(router.route(_prompt(1, 32), "a"))
    assert router.route(_prompt(1, 32), "b").matched_tokens == 0
    assert router.route(_prompt(1, 32), "a").matched_tokens == 32 * BLOCK_TOKENS


def test_a_prompt_that_is_not_cached_leaves_no_prefix() -> None:
    router = Router([_ROOM])
    router.route(_prompt(1, 4), caches=False, samples=0)
    assert router.cached_blocks(0) == 0
    assert router.load(0) == 4 * BLOCK_TOKENS + 8


def test_load_that_others_sent_counts() -> None:
    router = Router([_ROOM, _ROOM])
    router.report(0, prompt_tokens=5000, samples=2)
    assert router.load(0) == 5000 + 2 * SAMPLE_TOKENS
    assert {router.route([number]).replica for number in range(10)} == {1}
    router.report(0, prompt_tokens=0, samples=0)
    assert router.route([77]).replica == 0


def test_a_report_that_comes_before_a_request_arrived_takes_nothing_from_what_is_known() -> None:
    router = Router([_ROOM])
    router.route([1] * 100)
    router.report(0, prompt_tokens=0, samples=0)
    assert router.load(0) == 100 + SAMPLE_TOKENS


def test_a_lost_replica_is_returned_its_routes_and_recovers_empty() -> None:
    router = Router([_ROOM, _ROOM])
    route = router.route(_prompt(1, 8))
    assert router.lose(route.replica) == [route]
    assert (router.load(route.replica), router.cached_blocks(route.replica)) == (0, 0)
    router.ended(route)  # whose reader learns of it later
    assert router.load(route.replica) == 0
    again = router.reroute(route, _prompt(1, 8))
    assert (again.replica, again.attempt) == (1 - route.replica, 2)
    router.recover(route.replica)
    router.ended(again)
    assert router.route(_prompt(1, 8)).matched_tokens == 8 * BLOCK_TOKENS


def test_a_request_that_may_end_engines_gets_no_third_one() -> None:
    router = Router([_ROOM] * (MAX_REPLICAS + 1))
    route = router.route([1])
    for _ in range(MAX_REPLICAS - 1):
        router.lose(route.replica)
        route = router.reroute(route, [1])
    router.lose(route.replica)
    with pytest.raises(NoReplica, match="2 engines have ended"):
        router.reroute(route, [1])


def test_no_replica_that_serves_is_a_clear_error() -> None:
    router = Router([_ROOM, _ROOM])
    router.drain(0)
    router.lose(1)
    with pytest.raises(NoReplica, match="0 is draining, 1 is lost"):
        router.route([1])
    router.drain(1)
    assert router.standing(1) is ReplicaState.LOST


_REQUESTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(1, 3)), max_size=60)


@settings(deadline=None)
@given(st.integers(1, 5), _REQUESTS)
def test_loads_differ_by_no_more_than_a_request_and_what_its_prefix_saved(
    replicas: int, asked: list[tuple[int, int, int]]
) -> None:
    router = Router([_ROOM] * replicas)
    bound = 0
    for document, blocks, samples in asked:
        route = router.route(_prompt(document, blocks), samples=samples)
        bound = max(bound, route.prompt_tokens + samples * SAMPLE_TOKENS + route.matched_tokens)
        loads = [router.load(number) for number in range(replicas)]
        assert max(loads) - min(loads) <= bound


def test_random_traffic_with_ends_stays_balanced_and_finds_its_prefixes() -> None:
    draw = random.Random(15)
    router = Router([_ROOM] * 4)
    under_way: list[Route] = []
    sent: Counter[int] = Counter()
    matched = prompts = 0
    for _ in range(4000):
        prompt = _prompt(draw.randrange(24), draw.randint(4, 24), draw.randrange(10_000))
        route = router.route(prompt)
        router.begun(route)
        sent[route.replica] += 1
        matched, prompts = matched + route.matched_tokens, prompts + len(prompt)
        under_way.append(route)
        if len(under_way) > 64:
            router.ended(under_way.pop(draw.randrange(len(under_way))))
    assert max(sent.values()) < 1.25 * min(sent.values())
    assert matched > 0.9 * prompts


class RouterMachine(RuleBasedStateMachine):
    """Any order of events, beside plain books."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 20 * BLOCK_TOKENS
        self.router = Router([self.room] * 3)
        self.standings = [ReplicaState.SERVING] * 3
        self.routes: list[Route] = []
        self.begun: set[Route] = set()

    @rule(document=st.integers(0, 2), blocks=st.integers(0, 30), samples=st.integers(0, 3), caches=st.booleans())
    def route(self, document: int, blocks: int, samples: int, caches: bool) -> None:
        serving = [number for number, one in enumerate(self.standings) if one is ReplicaState.SERVING]
        loads = [self.router.load(number) for number in range(3)]
        prompt = _prompt(document, blocks)
        if not serving:
            with pytest.raises(NoReplica):
                self.router.route(prompt, samples=samples, caches=caches)
            return
        route = self.router.route(prompt, samples=samples, caches=caches)
        assert route.replica in serving
        assert route.prompt_tokens + route.matched_tokens == len(prompt)
        assert route.prompt_tokens > 0
        assert loads[route.replica] <= min(loads[number] for number in serving) + route.matched_tokens
        self.routes.append(route)

    @precondition(lambda self: self.routes)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        route = data.draw(st.sampled_from(self.routes))
        self.router.begun(route)
        self.begun.add(route)

    @precondition(lambda self: self.routes)
    @rule(data=st.data(), twice=st.booleans())
    def end(self, data: st.DataObject, twice: bool) -> None:
        route = data.draw(st.sampled_from(self.routes))
        self.routes.remove(route)
        self.router.ended(route)
        if twice:
            self.router.ended(route)

    @rule(replica=st.integers(0, 2))
    def drain(self, replica: int) -> None:
        self.router.drain(replica)
        if self.standings[replica] is ReplicaState.SERVING:
            self.standings[replica] = ReplicaState.DRAINING

    @rule(replica=st.integers(0, 2))
    def lose(self, replica: int) -> None:
        lost = self.router.lose(replica)
        assert set(lost) == {route for route in self.routes if route.replica == replica}
        self.routes = [route for route in self.routes if route.replica != replica]
        self.standings[replica] = ReplicaState.LOST

    @rule(replica=st.integers(0, 2))
    def recover(self, replica: int) -> None:
        self.router.recover(replica)
        self.standings[replica] = ReplicaState.SERVING

    @invariant()
    def books_agree(self) -> None:
        for replica in range(3):
            here = [route for route in self.routes if route.replica == replica]
            prompts = sum(route.prompt_tokens for route in here if route not in self.begun)
            assert self.router.standing(replica) is self.standings[replica]
            assert self.router.under_way(replica) == len(here)
            assert self.router.load(replica) == prompts + SAMPLE_TOKENS * sum(route.samples for route in here)
            assert self.router.cached_blocks(replica) <= self.room // BLOCK_TOKENS


RouterMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestRouterMachine = RouterMachine.TestCase


def _of_blocks(blocks: list[int]) -> list[int]:
    """A block of equal ids for each number, and a token over."""
    return [number for number in blocks for _ in range(BLOCK_TOKENS)] + [9]


_BLOCKS = st.lists(st.integers(0, 2), max_size=8)


@settings(deadline=None)
@given(_BLOCKS, _BLOCKS)
def test_keys_agree_as_far_as_the_tokens_do(one: list[int], other: list[int]) -> None:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    keys, others = prefix_keys(_of_blocks(one)), prefix_keys(_of_blocks(other))
    assert len(keys) == len(one)
    assert keys[:same] == others[:same]
    assert not set(keys[same:]) & set(others[same:])


def test_keys_of_other_salts_share_nothing() -> None:
    prompt = _of_blocks([1, 2, 3])
    assert not set(prefix_keys(prompt, "a")) & set(prefix_keys(prompt, "b"))


def test_the_last_token_is_always_left_over() -> None:
    assert prefix_keys([1] * BLOCK_TOKENS) == []
    assert len(prefix_keys([1] * (BLOCK_TOKENS + 1))) == 1
    assert prefix_keys([]) == prefix_keys([5]) == []


@settings(deadline=None)
@given(st.integers(0, 12), st.lists(_BLOCKS, max_size=30))
def test_memory_is_bounded_and_what_is_held_has_all_that_comes_before_it(most: int, prompts: list[list[int]]) -> None:
    held = CachedPrefixes(most)
    for blocks in prompts:
        keys = prefix_keys(_of_blocks(blocks))
        held.note(keys)
        assert len(held) <= most
        assert held.matched(keys) == min(len(keys), most)
    every = {key for blocks in prompts for key in prefix_keys(_of_blocks(blocks))}
    known = {key for key in every if held.matched([key])}
    for blocks in prompts:
        keys = prefix_keys(_of_blocks(blocks))
        assert held.matched(keys) == sum(key in known for key in keys)


def test_the_end_of_the_least_recent_prompt_is_forgotten_first() -> None:
    held = CachedPrefixes(4)
    old, new = prefix_keys(_of_blocks([1, 1, 1])), prefix_keys(_of_blocks([2, 2]))
    held.note(old)
    held.note(new)
    assert (held.matched(old), held.matched(new)) == (2, 2)
    held.clear()
    assert len(held) == held.matched(old) == 0
