"""One engine and several clients, without sockets: who is told what, and that nobody can disturb the others."""

from __future__ import annotations

import gc
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from strata import LLM, SamplingParams
from strata.engine.faults import EngineFault
from strata.engine.grammars.grammar import GrammarCompiler
from strata.engine.loop import StepOutput, StepTiming
from strata.engine.outputs import Logprob
from strata.engine.plan import NOTHING
from strata.engine.process.messages import (
    Abort,
    Add,
    Delta,
    Embed,
    Embedding,
    Fault,
    Finish,
    FromEngine,
    Hello,
    PromptLogprobs,
    Ready,
    Refused,
    Step,
    ToEngine,
    TokenLogprobs,
)
from strata.engine.process.service import Service
from strata.engine.recorded_steps import REASONS
from strata.engine.request import Request, Sequence, Status, Update
from strata.engine.watch.step_shares import StepShares
from strata.kernels.compiled import KINDS
from tests.engine.grammars.test_closed_objects import json_grammar
from tests.engine.test_failed_requests import NAN_TOKEN, break_embedding

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
A, B = b"client a", b"client b"


class Desk:
    """A service whose clients are lists of what they were told."""

    def __init__(self, llm: LLM, *clients: bytes) -> None:
        self.llm = llm
        self.told: dict[bytes, list[FromEngine]] = defaultdict(list)
        self.gone: set[bytes] = set()
        self.logged: list[str] = []
        self.service = Service(llm.engine, "tiny", self._send, self.logged.append, check=True)
        for client in clients:
            self.say(client, Hello())
            assert isinstance(self.told[client].pop(), Ready)

    def _send(self, client: bytes, frame: bytes) -> bool:
        if client not in self.gone:
            self.told[client].append(msgspec.msgpack.decode(frame, type=FromEngine))
        return client not in self.gone

    def say(self, client: bytes, *messages: ToEngine) -> None:
        for message in messages:
            self.service.receive(client, msgspec.msgpack.encode(message))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.service.step()
            self.service.report()

    def run(self) -> None:
        """Step until nothing is left to do."""
        deadline = time.monotonic() + 60
        while self.service.patience < 0.1:
            assert time.monotonic() < deadline
            self.steps(1)
        self.service.report()

    def of(self, client: bytes, kind: type) -> list[Any]:
        return [message for message in self.told[client] if isinstance(message, kind)]

    def deltas(self, client: bytes, id: str = "a") -> list[Delta]:
        return [delta for step in self.of(client, Step) for delta in step.deltas if delta.id == id]

    def ids(self, client: bytes, id: str = "a", index: int = 0) -> list[int]:
        return [token for delta in self.deltas(client, id) if delta.index == index for token in delta.tokens]


@pytest.fixture
def llm(engine: Callable[..., LLM]) -> LLM:
    return engine(dtype="float32")


def generated(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    return [sample.token_ids for sample in output.outputs]


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

    def test_what_nobody_expected_is_told_to_its_client_alone(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = Desk(llm, A)

        def fails(*_: object) -> None:
            raise KeyError("surprise")

        with monkeypatch.context() as patched:
            patched.setattr(llm.engine.loop, "add", fails)
            desk.say(A, Add("a", [1], GREEDY))
        assert "surprise" in desk.of(A, Refused)[0].message
        assert "Traceback" in desk.logged[0]
        desk.say(A, Add("a", [5, 6, 7], GREEDY))
        desk.run()
        assert desk.ids(A) == generated(llm, [5, 6, 7], GREEDY)[0]

    def test_a_request_that_the_scheduler_cannot_take_leaves_the_others(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desk = Desk(llm, A, B)
        desk.say(B, Add("b", [5, 6, 7], GREEDY))
        desk.steps(2)

        def fails(*_: object) -> None:
            raise KeyError("surprise")

        with monkeypatch.context() as patched:
            patched.setattr("strata.engine.scheduling.scheduler.Sequence", fails)
            desk.say(A, Add("a", [1], GREEDY))
        assert "surprise" in desk.of(A, Refused)[0].message
        desk.run()
        assert desk.ids(B, "b") == generated(llm, [5, 6, 7], GREEDY)[0]

    def test_a_fault_of_the_engine_is_not_the_clients(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        desk = Desk(llm, A, B)

        def fails(*_: object) -> None:
            raise EngineFault("out of memory")

        monkeypatch.setattr(llm.engine.loop, "add", fails)
        with pytest.raises(EngineFault, match="out of memory"):
            desk.say(A, Add("a", [1], GREEDY))
        desk.service.fail("out of memory")
        assert desk.told[A] == desk.told[B] == [Fault("out of memory")]


class TestFailedRequests:
    def test_nan_ends_its_request_with_an_error(self, folder: Path, tmp_path: Path) -> None:
        llm = LLM(break_embedding(folder, tmp_path), device="cpu", dtype="float32", num_pages=100)
        params = replace(GREEDY, n=2, logprobs=1)
        desk = Desk(llm, A, B)
        desk.say(
            A, Add("a", [1, NAN_TOKEN], params), Add("b", [5, 6], GREEDY), Embed("e", [NAN_TOKEN, 1]), Embed("f", [1])
        )
        desk.run()
        told = desk.deltas(A)
        assert {(delta.index, delta.finish_reason) for delta in told} == {(0, "error"), (1, "error")}
        assert all(delta.tokens == [] and "NaN" in str(delta.error) for delta in told)
        assert desk.ids(A, "b") == generated(llm, [5, 6], GREEDY)[0]
        (refused,) = desk.of(A, Refused)
        assert refused.id == "e"
        assert "NaN" in refused.message
        assert [embedding.id for embedding in desk.of(A, Embedding)] == ["f"]
        assert desk.service.statistics().failed == 2


class TestEmbeddings:
    def test_are_those_of_the_offline_api_between_steps(self, engine: Callable[..., LLM]) -> None:
        llm = engine(dtype="float32", max_num_batched_tokens=60)
        prompts = {f"{i}": [(i + 3 * k) % 300 for k in range(5 + 10 * i)] for i in range(5)}
        desk = Desk(llm, A, B)
        desk.say(B, Add("a", [5, 6, 7], GREEDY))
        desk.say(A, *(Embed(id, prompt, "mean") for id, prompt in prompts.items()))
        assert desk.service.statistics().waiting == 6
        assert desk.service.statistics().waiting_tokens == 3 + sum(map(len, prompts.values()))
        desk.run()
        want = llm.embed([{"prompt_token_ids": ids} for ids in prompts.values()], pooling="mean", use_tqdm=False)
        told = {embedding.id: np.frombuffer(embedding.values, "<f4").tolist() for embedding in desk.of(A, Embedding)}
        assert told == {id: output.outputs.embedding for id, output in zip(prompts, want, strict=True)}
        assert desk.ids(B) == generated(llm, [5, 6, 7], GREEDY)[0]

    def test_no_step_is_put_off_beside_one_and_its_time_is_not_learnt(
        self, llm: LLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desk, forgotten = Desk(llm, A), []
        monkeypatch.setattr(type(llm.engine.loop), "delay", 0.25)
        monkeypatch.setattr(llm.engine.loop, "forget_under_way", lambda: forgotten.append(True))
        desk.say(A, Add("a", [5, 6, 7], GREEDY))
        desk.steps(2)
        assert (desk.service.delay, forgotten) == (0.25, [])
        desk.say(A, Embed("b", [1]))
        assert desk.service.delay == 0
        desk.steps(1)
        assert forgotten == [True]
        desk.run()

    def test_an_aborted_one_is_not_told(self, llm: LLM) -> None:
        desk = Desk(llm, A, B)
        desk.say(A, Embed("a", [1]), Embed("b", [2]), Embed("c", [3]), Abort(["b"]))
        desk.say(B, Embed("a", [4]), Hello())
        desk.service._embeddings.launch(beside_generations=False)
        desk.say(A, Abort(["a"]))
        desk.run()
        assert [embedding.id for embedding in desk.of(A, Embedding)] == ["c"]
        assert not desk.of(B, Embedding)

    @pytest.mark.parametrize("end", [Abort(["a"]), Hello()], ids=["aborted", "forgotten"])
    def test_an_id_that_is_used_again_gets_the_vector_of_its_new_prompt(self, llm: LLM, end: Abort | Hello) -> None:
        desk = Desk(llm, A)
        desk.say(A, Embed("a", [1, 2, 3]))
        desk.service._embeddings.launch(beside_generations=False)  # under way when it is given up
        desk.say(A, end, Embed("a", [7, 8]))
        desk.run()
        (told,) = desk.of(A, Embedding)
        (want,) = llm.embed({"prompt_token_ids": [7, 8]}, use_tqdm=False)
        assert np.frombuffer(told.values, "<f4").tolist() == want.outputs.embedding

    def test_a_generation_whose_id_is_used_again_is_told_apart_from_the_one_that_runs(self, llm: LLM) -> None:
        desk = Desk(llm, A)
        llm.engine.loop._run_ahead = True
        try:
            desk.say(A, Add("a", [1, 2, 3], GREEDY))
            desk.steps(3)
            assert desk.ids(A)
            desk.told[A].clear()
            desk.say(A, Abort(["a"]), Add("a", [7, 8], GREEDY))
            desk.run()
        finally:
            llm.engine.loop._run_ahead = False
        assert [desk.ids(A)] == generated(llm, [7, 8], GREEDY)


class TestGrammars:
    def test_are_followed(self, llm: LLM) -> None:
        grammar = json_grammar({"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]})
        desk = Desk(llm, A)
        desk.say(A, Add("a", [1, 2], replace(GREEDY, max_tokens=60), grammar=grammar), Add("b", [5, 6, 7], GREEDY))
        desk.run()
        text = llm.get_tokenizer().decode(desk.ids(A))
        assert json.loads(text)["a"] in (1, 22)
        assert desk.deltas(A)[-1].finish_reason == "stop"
        assert desk.ids(A, "b") == generated(llm, [5, 6, 7], GREEDY)[0]

    def test_one_that_is_compiled_while_its_client_leaves(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: time.sleep(0.1))
        desk = Desk(llm, A)
        desk.say(A, Add("a", [1], GREEDY, grammar="{}"), Finish("a", 0, "x"))
        assert 0 < desk.service.patience < 0.1
        desk.say(A, Abort(["a"]))
        desk.run()
        time.sleep(0.15)
        desk.steps(1)
        assert not desk.deltas(A)
        assert not desk.of(A, Refused)

    def test_several_wrong_ones_of_a_client_that_has_left(self, llm: LLM) -> None:
        desk = Desk(llm, A, B)
        desk.say(A, *(Add(id, [1], GREEDY, grammar='{"grammars": 5}') for id in "abc"))
        desk.gone.add(A)
        time.sleep(0.1)
        desk.say(B, Add("a", [5, 6, 7], GREEDY))
        desk.run()
        assert desk.ids(B) == generated(llm, [5, 6, 7], GREEDY)[0]


def test_the_host_time_of_a_step_is_small() -> None:
    """256 sequences that get a token each: what the service adds to a step must hide beside the device's work."""
    request = Request("0", (1,), GREEDY)
    sequences = [Sequence(i, replace(request, id=f"{i}"), 0, 100, [1], 1) for i in range(256)]
    for sequence in sequences:
        sequence.status = Status.RUNNING
    timing = StepTiming(NOTHING, (), 1e12, 0.0, 0.0)
    output = StepOutput([Update(sequence, 77, None) for sequence in sequences], {}, None, [], timing)
    scheduler = SimpleNamespace(
        running=256,
        waiting=0,
        waiting_tokens=0,
        statistics=SimpleNamespace(prefix_queries=0, prefix_hits=0, preemptions=0),
        max_sequences=256,
    )
    waiting = iter(sequences)
    loop = SimpleNamespace(
        idle=False,
        clock=time.monotonic,
        scheduler=scheduler,
        launch_late=lambda behind: None,
        step=lambda: output,
        add=lambda *_: [next(waiting)],
    )
    sizes = SimpleNamespace(vocab_size=4096, hidden_size=8)
    engine = SimpleNamespace(
        loop=loop,
        pages=SimpleNamespace(usage=0.5, num_pages=10, page_size=16),
        pooler=None,
        tokenizer=None,
        config=sizes,
        max_model_len=100,
        eos_ids=frozenset[int](),
        bad_words=(),
        default_params=GREEDY,
        ledger=SimpleNamespace(device="cpu"),
        startup={},
        compilations=SimpleNamespace(counts=dict.fromkeys(KINDS, 0)),
        recorded=SimpleNamespace(sizes=[], unrecorded=dict.fromkeys(REASONS, 0)),
        ranks=None,
        shares=StepShares(),
    )
    frames: list[bytes] = []
    service = Service(cast(Any, engine), "stub", lambda _, frame: not frames.append(frame), print)
    service.receive(A, msgspec.msgpack.encode(Hello()))
    for i in range(256):
        service.receive(A, msgspec.msgpack.encode(Add(f"chatcmpl-{i:032}", [1], GREEDY)))
    service.step()
    gc.collect()
    times = []
    for _ in range(200):
        began = time.thread_time()
        service.step()
        service.report()
        times.append(time.thread_time() - began)
    step = msgspec.msgpack.decode(frames[-1], type=FromEngine)
    assert isinstance(step, Step)
    assert len(step.deltas) == 256
    assert min(times) < 1e-3, f"{1e6 * min(times):.0f} us"
