"""One engine and several clients, without sockets: who is told what, and that nobody can disturb the others."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from strata import LLM, SamplingParams
from strata.engine.faults import EngineFault
from strata.engine.outputs import Logprob
from strata.engine.process.messages import (
    Abort,
    Add,
    Embed,
    Embedding,
    Fault,
    Finish,
    Hello,
    PromptLogprobs,
    Ready,
    Refused,
    Step,
    TokenLogprobs,
)
from tests.engine.process.desk import GREEDY, A, B, Desk, generated


class TestWhatIsTold:
    def test_who_the_engine_is(self, llm: LLM) -> None:
        desk = Desk(llm)
        desk.say(A, Hello())
        (ready,) = desk.told[A]
        assert isinstance(ready, Ready)
        assert (ready.model, ready.vocab_size, ready.hidden_size, ready.max_model_len) == ("tiny", 307, 48, 256)
        assert (ready.eos_ids, ready.num_pages, ready.page_size, ready.max_sequences) == ([0], 200, 16, 256)
        assert ready.default_params == llm.get_default_sampling_params()

    def test_each_client_gets_its_own_in_one_frame_a_step(self, llm: LLM) -> None:
        desk = Desk(llm, A, B)
        desk.say(A, Add("a", [5, 6, 7], GREEDY), Add("b", [8, 9], GREEDY))
        desk.say(B, Add("a", [8, 9, 10], GREEDY))
        desk.run()
        assert desk.ids(A) == generated(llm, [5, 6, 7], GREEDY)[0]
        assert desk.ids(A, "b") == generated(llm, [8, 9], GREEDY)[0]
        assert desk.ids(B) == generated(llm, [8, 9, 10], GREEDY)[0]
        for client in (A, B):
            steps = [step for step in desk.of(client, Step) if step.deltas]
            assert len(steps) == 12
            assert all(max(Counter(delta.id for delta in step.deltas).values()) == 1 for step in steps)
        assert desk.deltas(A)[-1].finish_reason == "length"
        assert [delta.finish_reason for delta in desk.deltas(A)[:-1]] == [None] * 11

    @pytest.mark.parametrize("run_ahead", [False, True])
    def test_samples_and_stop_ids(self, folder: Path, run_ahead: bool) -> None:
        llm = LLM(folder, device="cpu", dtype="float32", num_pages=100)
        llm.engine.loop._run_ahead = run_ahead
        params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=9, ignore_eos=True)
        want = generated(llm, [1, 2, 3], params)
        params = replace(params, stop_token_ids=[want[2][4]])
        desk = Desk(llm, A)
        desk.say(A, Add("a", [1, 2, 3], params))
        desk.run()
        assert [desk.ids(A, index=index) for index in range(4)] == generated(llm, [1, 2, 3], params)
        ends = {d.index: (d.finish_reason, d.stop_reason) for d in desk.deltas(A) if d.finish_reason is not None}
        assert ends[2] == ("stop", want[2][4])
        assert len(ends) == 4

    def test_when_it_was_scheduled_and_what_was_cached_are_told_once(self, llm: LLM) -> None:
        desk = Desk(llm, A)
        prompt = [(11 * i) % 300 for i in range(40)]
        desk.say(A, Add("first", prompt, GREEDY))
        desk.run()
        before = time.monotonic()
        desk.say(A, Add("a", prompt, replace(GREEDY, n=2), arrival=before))
        desk.run()
        first, *rest = desk.deltas(A)
        assert first.scheduled is not None
        assert before < first.scheduled < time.monotonic()
        assert first.cached_tokens == 32
        assert all(delta.scheduled is None and delta.cached_tokens is None for delta in rest)

    def test_logprobs_are_those_of_the_offline_api(self, engine: Callable[..., LLM]) -> None:
        llm = engine(dtype="float32", deterministic=True)
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
        prompt = list(range(40))
        (want,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        desk = Desk(llm, A)
        desk.say(A, Add("a", prompt, params), Add("plain", [1, 2], GREEDY))
        desk.run()
        assert all(delta.logprobs is None for delta in desk.deltas(A, "plain"))
        told = [entry for delta in desk.deltas(A) for entry in delta.logprobs or ()]
        assert want.outputs[0].logprobs is not None
        assert [by_id(entry) for entry in told] == [without_text(entry) for entry in want.outputs[0].logprobs]
        (prompt_told,) = desk.of(A, PromptLogprobs)
        assert (prompt_told.id, prompt_told.first, len(prompt_told.logprobs)) == ("a", 1, 39)
        assert want.prompt_logprobs is not None
        for entry, expected in zip(prompt_told.logprobs, want.prompt_logprobs[1:], strict=True):
            assert expected is not None
            assert by_id(entry) == without_text(expected)
        first_step = next(place for place, said in enumerate(desk.told[A]) if isinstance(said, Step) and said.deltas)
        assert desk.told[A].index(prompt_told) < first_step

    def test_prompt_logprobs_are_told_once_though_preempted(self, folder: Path) -> None:
        llm = LLM(folder, device="cpu", dtype="float32", num_pages=14, max_num_batched_tokens=40)
        params = SamplingParams(temperature=0, max_tokens=30, prompt_logprobs=0, ignore_eos=True)
        desk = Desk(llm, A)
        prompts = {f"{index}": [(index + 7 * i) % 300 for i in range(50)] for index in range(5)}
        desk.say(A, *(Add(id, prompt, params) for id, prompt in prompts.items()))
        desk.run()
        assert desk.service.statistics().preemptions > 0
        for id, prompt in prompts.items():
            parts = [part for part in desk.of(A, PromptLogprobs) if part.id == id]
            assert [entry.token for part in parts for entry in part.logprobs] == prompt[1:]
            assert [part.first for part in parts] == [
                1 + sum(len(before.logprobs) for before in parts[:place]) for place in range(len(parts))
            ]

    def test_how_the_engine_stands(self, llm: LLM) -> None:
        desk = Desk(llm, A, B)
        before = desk.service.statistics()
        desk.say(A, *(Add(f"{i}", [i, 1, 2], GREEDY) for i in range(3)))
        assert desk.service.statistics().waiting == 3
        assert desk.service.statistics().waiting_tokens == 9
        desk.steps(1)
        shown = desk.of(A, Step)[-1].statistics
        assert (shown.running, shown.waiting, shown.steps) == (3, 0, 1)
        assert 0 < shown.kv_usage < 1
        assert not desk.of(B, Step)
        desk.run()
        for client in (A, B):  # told at once when the engine comes to rest, whoever it worked for
            rest = desk.of(client, Step)[-1]
            assert rest.deltas == []
            assert (rest.statistics.running, rest.statistics.kv_usage, rest.statistics.steps) == (0, 0, 12)
            assert rest.statistics.prefix_queries == before.prefix_queries + 9


def by_id(entry: TokenLogprobs) -> dict[int, tuple[float, int]]:
    ranked = {
        id: (value, rank) for rank, (id, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    }
    return {entry.token: (entry.logprob, entry.rank)} | ranked


def without_text(entry: dict[int, Logprob]) -> dict[int, tuple[float, int | None]]:
    return {id: (told.logprob, told.rank) for id, told in entry.items()}


class TestLeaving:
    @pytest.mark.parametrize("run_ahead", [False, True])
    @pytest.mark.parametrize("steps", [0, 1, 4], ids=["queued", "in prefill", "in decode"])
    @pytest.mark.parametrize("how", ["abort", "gone", "anew"])
    def test_frees_the_pages_at_once(self, folder: Path, run_ahead: bool, steps: int, how: str) -> None:
        llm = LLM(folder, device="cpu", dtype="float32", num_pages=60, max_num_batched_tokens=40)
        llm.engine.loop._run_ahead = run_ahead
        desk = Desk(llm, A, B)
        params = replace(GREEDY, n=2, max_tokens=40)
        desk.say(A, Add("a", [(3 * i) % 300 for i in range(90)], params), Add("b", [4, 5], params))
        desk.say(B, Add("a", [7, 8, 9], GREEDY, priority=-1))
        desk.steps(steps)
        pages = llm.engine.pages.usage
        if how == "abort":
            desk.say(A, Abort(["b", "unknown", "a", "a"]))
        elif how == "anew":
            desk.say(A, Hello())
        else:
            desk.gone.add(A)
            desk.service._clients[A].last_sent = 0  # it has not heard anything for long
            desk.service.report()
        assert llm.engine.pages.usage < pages or steps == 0
        assert llm.engine.pages.usage <= 1 / 60  # the other client's
        told = len(desk.told[A])
        desk.run()
        assert not [said for said in desk.told[A][told:] if isinstance(said, Step) and said.deltas]
        assert llm.engine.pages.usage == 0
        assert desk.ids(B) == generated(llm, [7, 8, 9], GREEDY)[0]
        if how != "gone":
            desk.say(A, Add("a", [1], GREEDY))  # the id is free again
            desk.run()
            assert len(desk.ids(A)) >= 12

    def test_an_abort_that_comes_first_does_no_harm(self, llm: LLM) -> None:
        desk = Desk(llm, A)
        desk.say(A, Abort(["a"]), Finish("a", 0, "x"), Add("a", [5, 6, 7], GREEDY))
        desk.run()
        assert desk.ids(A) == generated(llm, [5, 6, 7], GREEDY)[0]
        desk.say(A, Abort(["a"]), Finish("a", 0, "x"))

    def test_a_client_that_goes_while_it_is_told_something(self, llm: LLM) -> None:
        desk = Desk(llm, A, B)
        params = replace(GREEDY, prompt_logprobs=1, logprobs=1)
        desk.say(A, *(Add(id, [1, 2, 3], params) for id in "abc"), Embed("e", [1]), Embed("f", [1]))
        desk.say(B, Add("a", [5, 6, 7], GREEDY))
        desk.gone.add(A)
        desk.steps(1)
        assert desk.service.statistics().running == 1
        desk.run()
        assert desk.ids(B) == generated(llm, [5, 6, 7], GREEDY)[0]

    @pytest.mark.parametrize("run_ahead", [False, True])
    def test_a_stop_string_ends_one_sample(self, folder: Path, run_ahead: bool) -> None:
        llm = LLM(folder, device="cpu", dtype="float32", num_pages=100)
        llm.engine.loop._run_ahead = run_ahead
        params = SamplingParams(n=2, temperature=1.0, seed=7, max_tokens=9, ignore_eos=True)
        want = generated(llm, [1, 2, 3], params)
        desk = Desk(llm, A)
        desk.say(A, Add("a", [1, 2, 3], params))
        desk.steps(4)
        so_far = desk.ids(A)
        desk.say(A, Finish("a", 0, "stop here"), Finish("a", 0, "stop here"), Finish("a", 7, "no such sample"))
        desk.run()
        assert desk.ids(A) == so_far
        assert desk.ids(A, index=1) == want[1]
        desk.say(A, Add("a", [1], GREEDY))
        desk.steps(2)
        desk.say(A, Finish("a", 0, "stop here"))
        desk.run()
        assert llm.engine.pages.usage == 0
        desk.say(A, Add("a", [1], GREEDY))
        assert not desk.of(A, Refused)


REFUSED: dict[str, tuple[Add | Embed, str]] = {
    "empty": (Add("a", [], GREEDY), "the prompt is empty"),
    "long": (Add("a", [1] * 256, GREEDY), "max_model_len is 256"),
    "token": (Add("a", [1, 307], GREEDY), "token id 307 is out of range"),
    "negative": (Add("a", [-1], GREEDY), "token id -1 is out of range"),
    "bias": (Add("a", [1], replace(GREEDY, logit_bias={400: 1.0})), "logit_bias: token id 400 is out of range"),
    "stop": (Add("a", [1], replace(GREEDY, stop_token_ids=[400])), "stop_token_ids: token id 400 is out of range"),
    "bad word": (Add("a", [1], GREEDY, bad_words=[[3, 400]]), "bad_words: token id 400 is out of range"),
    "arrival": (Add("a", [1], GREEDY, arrival=float("nan")), "arrival must be finite"),
    "grammar": (Add("a", [1], GREEDY, grammar='{"grammars": 5}'), "the grammar cannot be followed"),
    "empty embedding": (Embed("a", []), "the prompt is empty"),
    "embedding token": (Embed("a", [307]), "token id 307 is out of range"),
}


class TestBadRequests:
    @pytest.mark.parametrize(("message", "reason"), REFUSED.values(), ids=REFUSED.keys())
    def test_are_refused_and_disturb_nobody(self, llm: LLM, message: Add | Embed, reason: str) -> None:
        desk = Desk(llm, A, B)
        desk.say(B, Add("a", [5, 6, 7], GREEDY))
        desk.steps(2)
        desk.say(A, message)
        desk.run()
        (refused,) = desk.of(A, Refused)
        assert refused.id == "a"
        assert reason in refused.message
        assert "\n" not in refused.message
        assert desk.ids(B) == generated(llm, [5, 6, 7], GREEDY)[0]
        desk.say(A, Add("a", [1], GREEDY))
        desk.run()
        assert len(desk.ids(A)) == 12

    def test_an_id_in_use(self, llm: LLM) -> None:
        desk = Desk(llm, A)
        desk.say(
            A,
            Add("a", [5, 6, 7], GREEDY),
            Embed("e", [1]),
            Add("a", [1], GREEDY),
            Embed("a", [1]),
            Add("e", [1], GREEDY),
        )
        desk.run()
        assert [refused.id for refused in desk.of(A, Refused)] == ["a", "a", "e"]
        assert all("is in use" in refused.message for refused in desk.of(A, Refused))
        assert desk.ids(A) == generated(llm, [5, 6, 7], GREEDY)[0]
        assert len(desk.of(A, Embedding)) == 1

    def test_an_empty_bad_word_is_none(self, llm: LLM) -> None:
        desk = Desk(llm, A)
        desk.say(A, Add("a", [5, 6, 7], GREEDY, bad_words=[[]]))
        desk.run()
        assert desk.ids(A) == generated(llm, [5, 6, 7], GREEDY)[0]

    def test_frames_that_are_no_messages(self, llm: LLM) -> None:
        desk = Desk(llm, A)
        good = msgspec.msgpack.encode(Add("g", [5, 6, 7], GREEDY))
        rng = random.Random(0)
        frames = [b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", good[:-1], good + b"\x00"]
        frames += [rng.randbytes(rng.randrange(200)) for _ in range(300)]
        for _ in range(300):
            broken = bytearray(good)
            broken[rng.randrange(len(broken))] = rng.randrange(256)
            frames.append(bytes(broken))
        for frame in frames:
            desk.service.receive(A, frame)
        desk.run()
        desk.say(A, Hello(), Add("a", [5, 6, 7], GREEDY))
        desk.run()
        assert desk.ids(A) == generated(llm, [5, 6, 7], GREEDY)[0]

    def test_fields_that_are_none_are_told_to_whose_they_are(self, llm: LLM) -> None:
        desk = Desk(llm, A)
        frame = msgspec.msgpack.encode({"type": "add", "id": "a", "prompt": [1], "params": {"n": 77}})
        desk.service.receive(A, frame)
        desk.service.receive(b"a stranger", frame)
        assert desk.of(A, Refused) == [Refused("a", "n must be an integer from 1 to 16, got 77 - at `$.params`")]
        assert not desk.told[b"a stranger"]

    def test_a_stranger_is_not_served_and_another_protocol_is_told(self, llm: LLM) -> None:
        desk = Desk(llm)
        desk.say(A, Add("a", [1], GREEDY), Abort(["a"]), Embed("e", [1]))
        desk.run()
        assert not desk.told[A]
        desk.say(A, Hello(protocol=99), Add("a", [1], GREEDY))
        desk.run()
        assert desk.told[A] == [Fault("the client speaks protocol 99, the engine 1")]

    @pytest.mark.parametrize(
        "what", ["strata.engine.loop.EngineLoop.add", "strata.engine.scheduling.scheduler.Sequence"]
    )
    def test_what_nobody_expected_is_told_to_its_client_alone(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch, what: str
    ) -> None:
        desk = Desk(llm, A, B)
        desk.say(B, Add("b", [5, 6, 7], GREEDY))
        desk.steps(2)

        def fails(*_: object) -> None:
            raise KeyError("surprise")

        with monkeypatch.context() as patched:
            patched.setattr(what, fails)
            desk.say(A, Add("a", [1], GREEDY))
        assert "surprise" in desk.of(A, Refused)[0].message
        assert "Traceback" in desk.logged[0]
        desk.say(A, Add("a", [5, 6, 7], GREEDY))
        desk.run()
        assert desk.ids(A) == desk.ids(B, "b") == generated(llm, [5, 6, 7], GREEDY)[0]

    def test_a_fault_of_the_engine_is_not_the_clients(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = Desk(llm, A, B)

        def fails(*_: object) -> None:
            raise EngineFault("out of memory")

        monkeypatch.setattr(llm.engine.loop, "add", fails)
        with pytest.raises(EngineFault, match="out of memory"):
            desk.say(A, Add("a", [1], GREEDY))
        desk.service.fail("out of memory")
        assert desk.told[A] == desk.told[B] == [Fault("out of memory")]
