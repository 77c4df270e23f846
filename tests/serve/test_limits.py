"""Limits on a clock of the test's own: nothing here sleeps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.serve.http.errors import ApiError
from strata.serve.http.limits import Admission, Caller, Limits
from strata.serve.settings import ServeSettings

ALICE, BOB = Caller("alice", "a"), Caller("bob", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, max_sequences: int = 4, **settings: Any) -> Limits:
    return Limits(ServeSettings("model", ("model",), **settings), max_sequences, clock)


def refused(made: Limits, caller: Caller = ALICE, *tokens: int, sequences: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        made.admit(caller, *(tokens or (1, 1)), sequences)
    return caught.value


def retry_after(error: ApiError) -> int:
    return int(error.headers["retry-after"])


def test_the_queue_is_bounded_over_all_callers() -> None:
    made = limits(Clock(), max_sequences=2, max_queue=1)
    admissions = [made.admit(caller, 5, 5) for caller in (ALICE, BOB, ALICE)]
    assert (made.in_flight, made.waiting) == (3, 1)
    error = refused(made, BOB)
    assert (error.status, error.code) == (503, "queue_full")
    assert retry_after(error) >= 1
    admissions[0].release(5)
    made.admit(BOB, 5, 5)


def test_each_sample_counts_as_a_sequence() -> None:
    made = limits(Clock(), max_sequences=4, max_queue=1)
    made.admit(ALICE, 1, 1, 3)
    assert refused(made, sequences=3).status == 503
    made.admit(ALICE, 1, 1, 2)
    assert made.in_flight == 5


def test_what_could_never_run_is_told_to_go_not_to_wait() -> None:
    made = limits(Clock(), max_sequences=2, max_queue=1, concurrency=2)
    error = refused(made, sequences=3)
    assert (error.status, error.param) == (400, "n")
    assert "retry-after" not in error.headers


def test_a_release_counts_once() -> None:
    made = limits(Clock(), max_sequences=1, max_queue=0)
    admission = made.admit(ALICE, 1, 1)
    admission.release(1)
    admission.release(1)
    made.admit(ALICE, 1, 1)
    assert refused(made).status == 503


def test_requests_per_minute_are_of_each_key_and_retry_after_is_true() -> None:
    clock = Clock()
    made = limits(clock, max_sequences=100, requests_per_minute=6)
    for _ in range(6):
        made.admit(ALICE, 1, 1)
    error = refused(made)
    assert (error.status, error.code) == (429, "requests_per_minute")
    assert retry_after(error) == 10  # one of six a minute
    made.admit(BOB, 1, 1)
    clock.now += 9.9
    assert refused(made).status == 429
    clock.now += 0.1
    made.admit(ALICE, 1, 1)
    assert refused(made).status == 429


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    made = limits(clock, max_sequences=1, max_queue=0, requests_per_minute=2, tokens_per_minute=100)
    admission = made.admit(ALICE, 10, 10)
    for _ in range(5):
        assert refused(made, ALICE, 10, 10).status == 503
    admission.release(10)
    made.admit(ALICE, 10, 70).release(70)  # 20 of 100 are gone, so exactly 80 are left


def test_tokens_not_generated_are_given_back() -> None:
    made = limits(Clock(), tokens_per_minute=100)
    first = made.admit(ALICE, 10, 80)
    error = refused(made, ALICE, 10, 10)
    assert (error.status, error.code) == (429, "tokens_per_minute")
    assert retry_after(error) == 6  # 10 tokens are left, and 10 more come in 6 s
    first.release(20)
    made.admit(ALICE, 10, 60).release(60)
    assert refused(made, ALICE, 1, 0).status == 429


def test_a_request_for_more_than_a_minute_of_tokens_waits_for_a_full_minute_and_leaves_a_debt() -> None:
    clock = Clock()
    made = limits(clock, tokens_per_minute=100)
    made.admit(ALICE, 10, 1000).release(240)
    error = refused(made, ALICE, 1, 0)
    assert retry_after(error) == 91  # 250 used of 100: 150 of debt and 1 at 100 a minute
    clock.now += retry_after(error)
    made.admit(ALICE, 1, 0)


def test_concurrency_is_of_each_key() -> None:
    made = limits(Clock(), concurrency=2)
    first = made.admit(ALICE, 1, 1, 2)
    error = refused(made)
    assert (error.status, error.code) == (429, "concurrency")
    assert retry_after(error) >= 1
    made.admit(BOB, 1, 1)
    first.release(1)
    made.admit(ALICE, 1, 1)


def test_retry_after_of_an_overload_follows_the_rate_of_releases() -> None:
    clock = Clock()
    made = limits(clock, max_sequences=1, max_queue=3)
    for _ in range(10):  # one each two seconds
        admission = made.admit(ALICE, 1, 1)
        clock.now += 2.0
        admission.release(1)
    for _ in range(4):
        made.admit(ALICE, 1, 1)
    clock.now += 2.0
    assert retry_after(refused(made)) == pytest.approx(8, abs=1)  # four places at 0.5 a second


def test_workers_share_every_bound() -> None:
    made = limits(Clock(), max_sequences=8, max_queue=4, api_workers=4, requests_per_minute=16, tokens_per_minute=400)
    for _ in range(3):
        made.admit(ALICE, 1, 1)
    assert refused(made).status == 503
    made = limits(Clock(), max_sequences=80, api_workers=4, requests_per_minute=16)
    for _ in range(4):
        made.admit(ALICE, 1, 1)
    assert refused(made).status == 429


def test_a_share_of_less_than_one_request_a_minute_still_admits_one() -> None:
    clock = Clock()
    made = limits(clock, max_sequences=80, api_workers=4, requests_per_minute=2)
    made.admit(ALICE, 1, 1)
    assert retry_after(refused(made)) == 120
    clock.now += 120
    made.admit(ALICE, 1, 1)


@given(
    st.lists(
        st.tuples(st.sampled_from([ALICE, BOB]), st.integers(1, 60), st.integers(0, 60), st.integers(1, 4)), max_size=40
    ),
    st.randoms(),
)
def test_no_order_of_requests_breaks_the_bounds(asked: list[tuple[Caller, int, int, int]], random: Any) -> None:
    clock = Clock()
    made = limits(clock, max_sequences=3, max_queue=3, concurrency=4, tokens_per_minute=120)
    held: list[tuple[Admission, Caller, int, int]] = []
    used = {ALICE: 0, BOB: 0}
    refusals: list[ApiError] = []
    start = clock.now
    for caller, prompt, most, sequences in asked:
        clock.now += random.random() * 5
        try:
            held.append((made.admit(caller, prompt, most, sequences), caller, most, sequences))
            used[caller] += prompt
        except ApiError as error:
            refusals.append(error)
        assert made.in_flight == sum(sequences for *_, sequences in held) <= 6
        for one in (ALICE, BOB):
            assert sum(sequences for _, holder, _, sequences in held if holder is one) <= 4
        if held and random.random() < 0.5:
            admission, holder, most, sequences = held.pop(random.randrange(len(held)))
            output = random.randint(0, sequences * most)
            used[holder] += output
            admission.release(output)
    for admission, *_ in held:
        admission.release(0)
    assert made.in_flight == 0
    assert all(error.status in (429, 503) and retry_after(error) >= 1 for error in refusals)
    # What was used is at most a full bucket, what refilled since, and what one request alone may overdraw it by.
    for count in used.values():
        assert count <= 120 + (clock.now - start) * 2 + (60 + 4 * 60)
