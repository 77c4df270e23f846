"""A service without sockets, and what its clients are told."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import msgspec

from strata import LLM, SamplingParams
from strata.engine.process.messages import (
    Delta,
    FromEngine,
    Hello,
    Ready,
    Step,
    ToEngine,
)
from strata.engine.process.service import Service

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


def generated(llm: LLM, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
    return [sample.token_ids for sample in output.outputs]
