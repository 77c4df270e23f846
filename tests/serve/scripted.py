"""An application whose engine plays a script: every request is answered with the same deltas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from starlette.testclient import TestClient

from strata.engine.process.messages import Add, Delta, Ready, Statistics, TokenLogprobs
from strata.engine.sampling_params import SamplingParams
from strata.engine.watch.request_ledger import RequestLedger
from strata.serve.client import EngineGone
from strata.serve.http.app import build_app
from strata.serve.http.gate import Gate
from strata.serve.http.keys import KeyRing
from strata.serve.http.limits import Limits
from strata.serve.observe.metrics import Metrics
from strata.serve.processes.drain import Drain
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState
from strata.text.tokenizer import Tokenizer

NAME = "scripted"
EOS = 1

Batch = Sequence[Delta] | Exception
"""What one step brings; the id of the deltas is put in when they are played."""


def delta(index: int, tokens: Sequence[int], reason: str | None = None, **fields: Any) -> Delta:
    return Delta("", index, list(tokens), reason, **fields)


class ScriptedStream:
    """`hangs`: after the script nothing more comes."""

    def __init__(self, id: str, script: Sequence[Batch], prompt_logprobs: list[TokenLogprobs], hangs: bool) -> None:
        self.prompt_logprobs = prompt_logprobs
        self.closed = False
        self.ended: float | None = None
        self._id = id
        self._script = iter(script)
        self._hangs = hangs
        self._expired = asyncio.Event()

    async def __anext__(self) -> list[Delta]:
        batch = next(self._script, None)
        if batch is None and self._hangs:
            await self._expired.wait()
            raise TimeoutError
        if batch is None:
            raise StopAsyncIteration
        if isinstance(batch, Exception):
            raise batch
        names = Delta.__struct_fields__[1:]
        return [Delta(self._id, *(getattr(one, name) for name in names)) for one in batch]

    def expire(self) -> None:
        self._expired.set()

    async def aclose(self) -> None:
        self.closed = True

    @property
    def client(self) -> ScriptedStream:
        return self

    def delivered(self, id: str, ended: float) -> None:
        self.ended = ended

    async def ledgers(self, name: str) -> list[RequestLedger]:
        return []


class ScriptedEngine:
    """Stands in for EngineClient."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Sequence[Batch],
        *,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        hangs: bool = False,
        defaults: SamplingParams | None = None,
    ) -> None:
        self.ready = Ready(
            model=NAME,
            vocab_size=tokenizer.vocab_size,
            hidden_size=8,
            max_model_len=1024,
            eos_ids=[EOS],
            default_params=defaults or SamplingParams(),
            max_sequences=64,
            num_pages=100,
            page_size=16,
            device="cpu",
            startup={},
        )
        self.statistics = Statistics()
        self.each_statistics = (self.statistics,)
        self.alive, self.cause = True, "it has ended"
        self.added: list[Add] = []
        self.finished: list[tuple[int, str]] = []
        self.streams: list[ScriptedStream] = []
        self._script = script
        self._prompt_logprobs = list(prompt_logprobs)
        self._hangs = hangs

    def submit(self, add: Add) -> ScriptedStream:
        if not self.alive:
            raise EngineGone("it has ended")
        self.added.append(add)
        self.streams.append(ScriptedStream(add.id, self._script, self._prompt_logprobs, self._hangs))
        return self.streams[-1]

    def finish(self, id: str, index: int, stop: str) -> None:
        self.finished.append((index, stop))

    async def ledgers(self, name: str) -> list[RequestLedger]:
        return []

    async def close(self) -> None:
        self.alive = False


class Scripted:
    """client: HTTP in memory. engine: what it was asked."""

    def __init__(self, client: TestClient, engine: ScriptedEngine, state: ServerState) -> None:
        self.client = client
        self.engine = engine
        self.state = state

    def chat(self, **fields: Any) -> Any:
        return self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "Hi"}], **fields})

    def complete(self, **fields: Any) -> Any:
        return self.post("/v1/completions", **{"prompt": "Hi", **fields})

    def stream_chat(self, **fields: Any) -> list[Any]:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
        return events(self.client.post("/v1/chat/completions", json=body).text)

    def stream_completion(self, **fields: Any) -> list[Any]:
        return events(self.client.post("/v1/completions", json={"prompt": "Hi", "stream": True, **fields}).text)

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        """What is answered, with that status."""
        response = self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()


Serve = Callable[..., AbstractContextManager[Scripted]]
"""`scripted_server` over the built-in model's tokenizer, as the fixture `serve_script` has it."""


def events(text: str) -> list[Any]:
    """The events of a stream; JSON read, "[DONE]" as it is."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "a stream ends with an empty line"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def served(
    engine: ScriptedEngine, tokenizer: Tokenizer, settings: ServeSettings, keys: KeyRing
) -> tuple[Gate, ServerState]:
    """The application over an engine, and what its handlers share."""
    state = ServerState(
        settings=settings,
        client=engine,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        limits=Limits(settings, engine.ready.max_sequences),
        metrics=Metrics(NAME),
    )

    async def connect() -> ServerState:
        return state

    app = build_app(settings, connect)
    return Gate(app, settings, keys, Drain(), state.limits.enter, state.metrics.rejected), state


@contextmanager
def scripted_server(tokenizer: Tokenizer, script: Sequence[Batch], **options: Any) -> Iterator[Scripted]:
    """options: of ScriptedEngine; `settings`: those of ServeSettings; `keys`: of the server."""
    settings = ServeSettings("unused", (NAME,), **options.pop("settings", {}))
    keys = KeyRing(options.pop("keys", ()))
    engine = ScriptedEngine(tokenizer, script, **options)
    gate, state = served(engine, tokenizer, settings, keys)
    with TestClient(gate, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield Scripted(client, engine, state)
