"""What a replica is thought to hold."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.engine.routing.held_prefixes import BLOCK_TOKENS, HeldPrefixes, prefix_keys


def _prompt(blocks: list[int]) -> list[int]:
    """A block of equal ids for each number, and a token over."""
    return [number for number in blocks for _ in range(BLOCK_TOKENS)] + [9]


_BLOCKS = st.lists(st.integers(0, 2), max_size=8)


@settings(deadline=None)
@given(_BLOCKS, _BLOCKS)
def test_keys_agree_as_far_as_the_tokens_do(one: list[int], other: list[int]) -> None:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    keys, others = prefix_keys(_prompt(one)), prefix_keys(_prompt(other))
    assert len(keys) == len(one)
    assert keys[:same] == others[:same]
    assert not set(keys[same:]) & set(others[same:])


def test_keys_of_other_salts_share_nothing() -> None:
    prompt = _prompt([1, 2, 3])
    assert not set(prefix_keys(prompt, "a")) & set(prefix_keys(prompt, "b"))


def test_the_last_token_is_always_left_over() -> None:
    assert prefix_keys([1] * BLOCK_TOKENS) == []
    assert len(prefix_keys([1] * (BLOCK_TOKENS + 1))) == 1
    assert prefix_keys([]) == prefix_keys([5]) == []


@settings(deadline=None)
@given(st.integers(0, 12), st.lists(_BLOCKS, max_size=30))
def test_memory_is_bounded_and_what_is_held_has_all_that_comes_before_it(most: int, prompts: list[list[int]]) -> None:
    held = HeldPrefixes(most)
    for blocks in prompts:
        keys = prefix_keys(_prompt(blocks))
        held.note(keys)
        assert len(held) <= most
        assert held.matched(keys) == min(len(keys), most)
    every = {key for blocks in prompts for key in prefix_keys(_prompt(blocks))}
    known = {key for key in every if held.matched([key])}
    for blocks in prompts:
        keys = prefix_keys(_prompt(blocks))
        assert held.matched(keys) == sum(key in known for key in keys)


def test_the_end_of_the_least_recent_prompt_is_forgotten_first() -> None:
    held = HeldPrefixes(4)
    old, new = prefix_keys(_prompt([1, 1, 1])), prefix_keys(_prompt([2, 2]))
    held.note(old)
    held.note(new)
    assert (held.matched(old), held.matched(new)) == (2, 2)
    held.clear()
    assert len(held) == held.matched(old) == 0
