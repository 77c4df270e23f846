"""Requests of a service that are no plain text: those that fail, embeddings, grammars; and the wire to it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from strata import LLM
from strata.engine.grammars.grammar import GrammarCompiler
from strata.engine.process.messages import (
    Abort,
    Add,
    Embed,
    Embedding,
    Finish,
    Hello,
    Refused,
)
from strata.engine.process.worker import Wire, serve
from tests.engine.grammars.test_closed_objects import json_grammar
from tests.engine.process.desk import GREEDY, A, B, Desk, generated
from tests.engine.test_faults import NAN_TOKEN, break_embedding


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


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    tmp_path.chmod(0o700)
    made = Wire(f"ipc://{tmp_path}/socket")
    yield made
    made.close()


@pytest.fixture
def client(wire: Wire) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(wire.socket.getsockopt(zmq.LAST_ENDPOINT).decode())  # type: ignore[union-attr]
    socket.send(b"hello")
    assert wire.socket.poll(60_000)
    assert [frame for _, frame in wire.waiting()] == [b"hello"]
    yield socket
    socket.close()
    context.term()


def passed(wire: Wire, seconds: float) -> float:
    began = time.perf_counter()
    wire.await_frame(seconds)
    return time.perf_counter() - began


def test_a_wait_is_as_long_as_was_asked_for(wire: Wire) -> None:
    times = [passed(wire, 0.3e-3) for _ in range(50)]
    assert min(times) >= 0.3e-3
    assert min(times) < 0.9e-3  # in which a poller could not end


def test_a_frame_ends_a_wait(wire: Wire, client: zmq.Socket[bytes]) -> None:
    for number in range(20):
        sender = threading.Timer(0.01, client.send, [b"%d" % number])
        sender.start()
        began = time.perf_counter()
        frames: list[bytes] = []
        while not frames:
            assert passed(wire, 20) < 10
            frames = [frame for _, frame in wire.waiting()]
        assert frames == [b"%d" % number]
        assert time.perf_counter() - began < 10
        sender.join()


def test_a_frame_that_has_come_before_ends_a_wait(wire: Wire, client: zmq.Socket[bytes]) -> None:
    client.send(b"a")
    assert wire.socket.poll(60_000)
    assert passed(wire, 20) < 10
    assert [frame for _, frame in wire.waiting()] == [b"a"]


class PutOff:
    """A service whose first step is due in half a second, and each other 50 ms after the one before; it ends the loop
    after three."""

    patience = 0.0

    def __init__(self, end: int) -> None:
        self._end = end
        self._due = time.monotonic() + 0.5
        self.events: list[tuple[str, float]] = []
        self.asked = 0

    @property
    def delay(self) -> float:
        self.asked += 1
        return max(0.0, self._due - time.monotonic())

    def receive(self, client: bytes, frame: bytes) -> None:
        self.events.append(("frame", time.monotonic()))

    def step(self) -> None:
        assert time.monotonic() >= self._due
        self._due = time.monotonic() + 0.05
        self.events.append(("step", time.monotonic()))
        if [kind for kind, _ in self.events].count("step") == 3:
            os.write(self._end, b"!")

    def report(self) -> None:
        pass


class Ended:
    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        self.descriptors = (reading,)

    def is_end_requested(self, readable: int) -> bool:
        return True


def test_frames_are_taken_while_a_step_is_put_off(wire: Wire, client: zmq.Socket[bytes]) -> None:
    ending: Any = Ended()
    service: Any = PutOff(ending.writing)
    sender = threading.Timer(0.01, client.send, [b"a"])
    sender.start()
    serve(service, wire, ending)
    sender.join()
    assert [kind for kind, _ in service.events] == ["frame", "step", "step", "step"]
    assert service.asked < 30  # it sleeps
