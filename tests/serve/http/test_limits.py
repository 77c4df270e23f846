"""Limits on a clock of the test's own, where nothing sleeps; and the keys whose limits they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.serve.http.errors import ApiError
from strata.serve.http.keys import KeyHash, KeyRing, KeySource
from strata.serve.http.limits import AdmittedRequest, Caller, Limits
from strata.serve.settings import ServeSettings

ALICE, BOB = Caller("alice", "a"), Caller("bob", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limits(clock: Clock, max_sequences: int = 4, **settings: Any) -> Limits:
    callers = settings.pop("callers", 1)
    return Limits(ServeSettings("model", ("model",), **settings), max_sequences, callers, clock)


def come(made: Limits, caller: Caller = ALICE) -> AdmittedRequest:
    """A request that comes to the door and is let in."""
    made.enter(caller)
    return made.admit(caller, 1, 1)


def turned_away(made: Limits, caller: Caller = ALICE) -> ApiError:
    with pytest.raises(ApiError) as caught:
        made.enter(caller)
    return caught.value


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
    assert turned_away(made, BOB).code == "queue_full"
    admissions[0].release(1, 5)
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
    admission.release(1, 1)
    admission.release(1, 1)
    admission.close()
    made.admit(ALICE, 1, 1)
    assert refused(made).status == 503


def test_requests_per_minute_are_of_each_key_and_retry_after_is_true() -> None:
    clock = Clock()
    made = limits(clock, max_sequences=100, requests_per_minute=6)
    for _ in range(6):
        come(made)
    error = turned_away(made)
    assert (error.status, error.code) == (429, "requests_per_minute")
    assert retry_after(error) == 10  # one of six a minute
    come(made, BOB)
    clock.now += 9.9
    assert turned_away(made).status == 429
    clock.now += 0.1
    come(made)
    assert turned_away(made).status == 429


def test_a_request_that_is_refused_after_it_came_in_counts_but_takes_no_tokens() -> None:
    made = limits(Clock(), max_sequences=1, max_queue=0, requests_per_minute=3, tokens_per_minute=100)
    made.enter(ALICE)
    admission = made.admit(ALICE, 10, 10)
    assert refused(made, ALICE, 10, 10).status == 503
    for _ in range(2):
        assert turned_away(made).status == 503
    assert turned_away(made).code == "requests_per_minute"  # those counted, too
    admission.release(1, 10)
    made.admit(ALICE, 10, 70).release(1, 70)  # 20 of 100 are gone, so exactly 80 are left


def test_an_estimate_gives_way_to_what_the_prompts_are() -> None:
    made = limits(Clock(), tokens_per_minute=100)
    admission = made.admit(ALICE, 60, 5, 2)
    assert refused(made, ALICE, 31, 0).code == "tokens_per_minute"
    admission.add_prompt(10)
    admission.add_prompt(10)
    made.admit(ALICE, 31, 0).close()  # 30 are held, and this took 31
    admission.release(1, 1)
    admission.release(1, 1)
    made.admit(ALICE, 47, 0)
    assert refused(made, ALICE, 1, 0).status == 429  # 22, 31 and 47 make 100


def test_what_fails_before_its_prompt_is_known_costs_its_estimate() -> None:
    made = limits(Clock(), tokens_per_minute=100)
    made.admit(ALICE, 60, 40).close()
    assert refused(made, ALICE, 41, 0).status == 429
    made.admit(ALICE, 40, 0)


def test_more_than_a_key_may_ever_have_is_refused_and_takes_nothing() -> None:
    made = limits(Clock(), max_sequences=8, concurrency=4, requests_per_minute=6, tokens_per_minute=100)
    for _ in range(20):
        assert refused(made, ALICE, 50, 1, sequences=5).status == 400
        with pytest.raises(ApiError) as caught:
            made.admit(ALICE, 50, 1, 1, requests=7)
        assert (caught.value.status, caught.value.code) == (400, "too_many_requests")
    made.enter(ALICE)
    made.admit(ALICE, 96, 1, 4, requests=6)  # all that it may have at once
    assert turned_away(made).code == "requests_per_minute"


def test_several_requests_in_one_count_as_many() -> None:
    clock = Clock()
    made = limits(clock, requests_per_minute=6)
    made.enter(ALICE)
    made.admit(ALICE, 1, 1, requests=4).close()
    made.enter(ALICE)
    with pytest.raises(ApiError) as caught:
        made.admit(ALICE, 1, 1, requests=3)
    assert (caught.value.code, retry_after(caught.value)) == ("requests_per_minute", 10)
    clock.now += 10
    made.admit(ALICE, 1, 1, requests=3)


def test_a_key_leaves_places_in_the_queue_to_the_others() -> None:
    made = limits(Clock(), max_sequences=2, max_queue=8, callers=2)
    for _ in range(6):  # what runs, and half of the queue
        made.admit(ALICE, 1, 1)
    error = refused(made)
    assert error.code == "queue_full"
    assert "of this key" in error.message
    made.admit(BOB, 1, 1)
    alone = limits(Clock(), max_sequences=2, max_queue=8)
    for _ in range(10):
        alone.admit(ALICE, 1, 1)


def test_tokens_not_generated_are_given_back() -> None:
    made = limits(Clock(), tokens_per_minute=100)
    first = made.admit(ALICE, 10, 80)
    error = refused(made, ALICE, 10, 10)
    assert (error.status, error.code) == (429, "tokens_per_minute")
    assert retry_after(error) == 6  # 10 tokens are left, and 10 more come in 6 s
    first.release(1, 20)
    made.admit(ALICE, 10, 60).release(1, 60)
    assert refused(made, ALICE, 1, 0).status == 429


def test_a_request_for_more_than_a_minute_of_tokens_waits_for_a_full_minute_and_leaves_a_debt() -> None:
    clock = Clock()
    made = limits(clock, tokens_per_minute=100)
    made.admit(ALICE, 10, 1000).release(1, 240)
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
    first.release(1, 1)
    made.admit(ALICE, 1, 1)


def test_retry_after_of_an_overload_follows_the_rate_of_releases() -> None:
    clock = Clock()
    made = limits(clock, max_sequences=1, max_queue=3)
    for _ in range(10):  # one each two seconds
        admission = made.admit(ALICE, 1, 1)
        clock.now += 2.0
        admission.release(1, 1)
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
        come(made)
    assert turned_away(made).status == 429


def test_a_share_of_less_than_one_request_a_minute_still_admits_one() -> None:
    clock = Clock()
    made = limits(clock, max_sequences=80, api_workers=4, requests_per_minute=2)
    come(made)
    assert retry_after(turned_away(made)) == 120
    clock.now += 120
    come(made)


@given(
    st.lists(
        st.tuples(st.sampled_from([ALICE, BOB]), st.integers(1, 60), st.integers(0, 60), st.integers(1, 4)), max_size=40
    ),
    st.randoms(),
)
def test_no_order_of_requests_breaks_the_bounds(asked: list[tuple[Caller, int, int, int]], random: Any) -> None:
    clock = Clock()
    made = limits(clock, max_sequences=3, max_queue=3, concurrency=4, tokens_per_minute=120)
    held: list[tuple[AdmittedRequest, Caller, int, int]] = []
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
            admission.release(sequences, output)
    for admission, *_ in held:
        admission.close()
    assert made.in_flight == 0
    assert all(error.status in (429, 503) and retry_after(error) >= 1 for error in refusals)
    # What was used is at most a full bucket, what refilled since, and what one request alone may overdraw it by.
    for count in used.values():
        assert count <= 120 + (clock.now - start) * 2 + (60 + 4 * 60)


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_names_are_given_or_counted(tmp_path: Path) -> None:
    ring = KeyRing(
        KeySource(key_file(tmp_path, "# ours\n\nalice:sk-one\nsk-two\n"), {"STRATA_API_KEYS": "bob:x, sk-4"}).read()
    )
    names = {key: caller.name for key in ("sk-one", "sk-two", "x", "sk-4") if (caller := ring.find(key))}
    assert names == {"sk-one": "alice", "sk-two": "key-2", "x": "bob", "sk-4": "key-4"}


@pytest.mark.parametrize("presented", ["", "sk-on", "sk-one ", "SK-ONE", "alice:sk-one", "sk-öne", "\udcff", "0" * 64])
def test_nothing_but_the_key_opens(tmp_path: Path, presented: str) -> None:
    """Nor its hash; a further colon belongs to the key."""
    keys = KeySource(key_file(tmp_path, "alice:sk-one\nbob:a:b"), {}).read()
    ring = KeyRing(keys)
    assert ring.find(presented) is ring.find(keys[0].digest) is None
    assert [ring.find(key) is not None for key in ("sk-one", "a:b")] == [True, True]


def test_salts_differ_by_key_only_and_do_not_hold_it() -> None:
    one, again, other = KeyHash.of("a", "sk-one"), KeyHash.of("b", "sk-one"), KeyHash.of("a", "sk-two")
    assert one.salt == again.salt != other.salt
    assert one.salt not in one.digest
    assert "sk-one" not in repr(one)


def test_the_environment_is_left_without_keys() -> None:
    environment = {"STRATA_API_KEY": "sk-one", "STRATA_API_KEYS": "sk-two,sk-three", "HOME": "/root"}
    assert len(KeySource(None, environment).read()) == 3
    assert environment == {"HOME": "/root"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "cannot be read"),
        (b"sk-one\nbob:s\xe9cret", r"keys, line 2, column 6: not UTF-8: byte 0xe9$"),
        *((mode, "chmod 600") for mode in (0o640, 0o604, 0o620, 0o602)),
        ("", "holds no API key"),
        ("# only a remark", "holds no API key"),
        ("sk-secret with space", "line 1: a key must"),
        ("fine\nalice:sk-sécret", "line 2: a key must"),
        ("al ice:sk-secret", "line 1: the name"),
        (":sk-secret", "line 1: the name"),
        ("alice:", "line 1: a key must"),
        ("alice:sk-secret\nalice:other", "line 2: this name is given twice"),
        ("alice:sk-secret\nbob:sk-secret", "line 2: this key is given twice"),
    ],
)
def test_what_is_no_key_is_told_by_its_line_and_never_shown(
    tmp_path: Path, text: str | bytes | int | None, what: str
) -> None:
    """text: of the file, which is not there if None; a number is its mode."""
    file = key_file(tmp_path, text if isinstance(text, str) else "sk-secret", text if isinstance(text, int) else 0o600)
    if isinstance(text, bytes):
        file.write_bytes(text)
    elif text is None:
        file.unlink()
    with pytest.raises(ValueError, match=what) as caught:
        KeySource(file, {}).read()
    assert "cret" not in str(caught.value)


def test_keys_that_are_read_again_keep_their_names_and_no_other_gets_one(tmp_path: Path) -> None:
    source = KeySource(key_file(tmp_path, "sk-one\nsk-two\nbob:sk-b"), {"STRATA_API_KEY": "sk-env"})

    def names(text: str) -> dict[str, str]:
        key_file(tmp_path, text)
        ring = KeyRing(source.read())
        keys = ("sk-one", "sk-two", "sk-b", "sk-env", "sk-new", "sk-newer")
        return {key: caller.name for key in keys if (caller := ring.find(key))}

    first = names("sk-one\nsk-two\nbob:sk-b")
    assert first == {"sk-one": "key-1", "sk-two": "key-2", "sk-b": "bob", "sk-env": "key-4"}
    assert names("sk-two\nbob:sk-b") == {"sk-two": "key-2", "sk-b": "bob", "sk-env": "key-4"}
    changed = names("sk-new\nsk-two\nsk-newer")
    assert {key: changed[key] for key in ("sk-two", "sk-env")} == {"sk-two": "key-2", "sk-env": "key-4"}
    assert len(set(changed.values())) == 4
    assert "key-1" not in changed.values()
    for wrong in ("", "no key at all", "a:sk-x\na:sk-y"):
        with pytest.raises(ValueError, match="keys"):
            names(wrong)
    assert names("sk-one\nsk-two\nbob:sk-b") == first


def test_no_keys_make_a_ring_that_is_false() -> None:
    assert not KeyRing(KeySource(None, {}).read())
