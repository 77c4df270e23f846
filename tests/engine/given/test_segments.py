"""Prompts of ids and other content: positions are counted, and content is told apart by what it is."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.given.segments import Content, positions
from strata.engine.plan import StepPlan, Tags
from strata.engine.request import Request
from strata.engine.routing.held_prefixes import BLOCK_TOKENS, prefix_keys
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.plans import scheduler, shares, step

CONTENTS = st.builds(Content, st.integers(1, 40), st.binary(max_size=3))
SEGMENTS = st.lists(st.one_of(st.lists(st.integers(0, 9), max_size=5), CONTENTS), max_size=5)


def flat(segments: list[list[int] | Content]) -> list[object]:
    """Each position by what stands there."""
    return [
        place
        for one in segments
        for place in (one if isinstance(one, list) else [(one, at) for at in range(one.positions)])
    ]


@given(SEGMENTS, SEGMENTS)
def test_prompts_agree_as_far_as_their_positions_do(
    one: list[list[int] | Content], other: list[list[int] | Content]
) -> None:
    prompts, places = (positions(one), positions(other)), (flat(one), flat(other))
    assert [len(prompt) for prompt in prompts] == [len(place) for place in places]
    assert [a == b for a, b in zip(*prompts, strict=False)] == [a == b for a, b in zip(*places, strict=False)]
    assert all((number >= 0) == isinstance(place, int) for number, place in zip(prompts[0], places[0], strict=True))


def added(of: Scheduler, id: str, prompt: tuple[int, ...], tags: Tags | None = None) -> int:
    """The tokens that a request finds cached."""
    (sequence,) = of.add(Request(id, prompt, SamplingParams(max_tokens=2), tags=tags))
    while not sequence.finished:
        step(of)
        of.check()
    return sequence.cached_tokens


def test_the_same_content_is_computed_once_and_another_is_not_taken_for_it() -> None:
    of = scheduler(page_size=4, longest=200)
    image, other = Content(10, b"image"), Content(10, b"other")
    assert added(of, "a", positions([[3, 4], image, [5, 6, 7, 8, 9]])) == 0
    assert added(of, "b", positions([[3, 4], image, [5, 6, 7, 8, 9]])) == 16
    assert added(of, "c", positions([[3, 4], image, [1, 2]])) == 12
    assert added(of, "d", positions([[3, 4], other, [5, 6, 7, 8, 9]])) == 0
    assert added(of, "e", positions([[3, 4], Content(9, b"image"), [5, 6, 7, 8, 9]])) == 0


def test_its_positions_fill_steps_and_pages() -> None:
    of = scheduler(page_size=4, budget=8)
    of.add(Request("a", positions([[3], Content(12, b"image"), [4]]), SamplingParams(max_tokens=2)))
    plan = of.schedule()
    assert plan is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan
    assert (shares(of, plan), len(plan.chunks[0].new_pages)) == ([("a", 0, 8)], 4)
    of.complete(plan, [])
    assert shares(of, step(of)) == [("a", 8, 6)]
    with pytest.raises(ValueError, match="the prompt has 102 tokens"):
        of.add(Request("b", positions([Content(100, b""), [3, 4]]), SamplingParams()))


def test_routers_tell_it_apart() -> None:
    image, other = (positions([[3] * BLOCK_TOKENS, Content(BLOCK_TOKENS, digest), [4]]) for digest in (b"a", b"b"))
    assert prefix_keys(image) == prefix_keys(list(image))
    assert prefix_keys(image)[1] != prefix_keys(other)[1]
    assert len(prefix_keys(image)) == 2


def test_who_gives_ids_gives_no_content() -> None:
    for prompt in ((3, -5), positions([[3], Content(2, b"image")])):
        with pytest.raises(ValueError, match="is out of range"):
            Request("a", prompt, SamplingParams()).check_ids(100)


def test_sequences_of_other_tags_share_no_prefixes() -> None:
    of, prompt = scheduler(page_size=4), tuple(range(3, 20))
    kinds = [None, Tags(adapter="x"), Tags(draft="x"), Tags(weights="x"), Tags("x", "x")]
    assert [added(of, f"first {number}", prompt, tags) for number, tags in enumerate(kinds)] == [0] * 5
    assert [added(of, f"again {number}", prompt, tags) for number, tags in enumerate(kinds)] == [16] * 5
    assert added(of, "none", prompt, Tags()) == 16, "tags that say nothing are none"


def test_plans_tell_the_tags_of_a_sequence() -> None:
    of = scheduler()
    of.add(Request("a", (3, 4, 5), SamplingParams(), tags=Tags(adapter="x", weights="2")))
    plan = of.schedule()
    assert plan is not None
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
    assert [new.tags for new in sent.new] == [Tags("x", "", "2")]
