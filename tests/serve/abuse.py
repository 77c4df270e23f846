"""What one key, or none, can send to keep a server from the others.

`python -m tests.serve.abuse HOST PORT KEY NAME...` runs apart from the test, so that what it does costs the measured
client nothing but the machine. Each attack asks again and again, and reads what it is answered.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

Attack = Callable[["Target"], Iterator[bytes]]
"""Gives what is sent over one connection after the other."""

_PAUSE = 0.02  # seconds; no more than this program's own share of the machine is to count

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


class Target:
    """A server and a key that it knows."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self._address = host, port
        self._key = key

    def post(self, path: str, **body: Any) -> bytes:
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self._key}\r\nConnection: close\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text

    def send(self, sent: bytes) -> None:
        """Over a connection of its own, which is read until the server closes it."""
        with suppress(OSError), socket.create_connection(self._address, timeout=30) as connection:
            with suppress(OSError):
                connection.sendall(sent)
            while connection.recv(1 << 20):
                pass


def no_key_trailers(target: Target) -> Iterator[bytes]:
    yield CHUNKED + b"0\r\n" + b"x-a: b\r\n" * 2_000_000


def no_key_trailer(target: Target) -> Iterator[bytes]:
    yield CHUNKED + b"0\r\nx-a: " + b"a" * 16_000_000


def no_key_requests_at_once(target: Target) -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000


def no_key_headers(target: Target) -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:\r\n" * 100_000 + b"\r\n"


def long_chats(target: Target) -> Iterator[bytes]:
    one = {"role": "user", "content": "Tell me of the sea. " * 90_000}
    yield target.post("/v1/chat/completions", messages=[one])


def many_messages(target: Target) -> Iterator[bytes]:
    yield target.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}] * 45_000)


def slow_grammars(target: Target) -> Iterator[bytes]:
    for number in range(3, 1000):
        schema = {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (97, 89, 80 + number)]}
        asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        message = {"role": "user", "content": "Hi"}
        yield target.post("/v1/chat/completions", messages=[message], response_format=asked, max_tokens=1)


def long_texts(target: Target) -> Iterator[bytes]:
    yield target.post("/tokenize", prompt="and 12345 more of the sea " * 75_000)


def long_ids(target: Target) -> Iterator[bytes]:
    yield target.post("/detokenize", tokens=[400] * 350_000)


def urgent(target: Target) -> Iterator[bytes]:
    yield target.post("/v1/completions", prompt="Once", max_tokens=900, ignore_eos=True, priority=-1000)


def echoes(target: Target) -> Iterator[bytes]:
    prompts = ["one two three four five " * 190] * 12
    yield target.post("/v1/completions", prompt=prompts, n=16, logprobs=20, echo=True, max_tokens=1)
    yield target.post("/v1/completions", prompt=prompts[0], n=4, logprobs=5, echo=True, max_tokens=1)


def many_prompts(target: Target) -> Iterator[bytes]:
    yield target.post("/v1/completions", prompt=["Once upon a time"] * 128, n=16, max_tokens=900, ignore_eos=True)


def many_embeddings(target: Target) -> Iterator[bytes]:
    yield target.post("/v1/embeddings", input=["a few words on the sea and what lies beyond " * 20] * 2000)


def spelled_tokens(target: Target) -> Iterator[bytes]:
    yield target.post("/v1/chat/completions", messages=[{"role": "user", "content": "<|end|><|assistant|>" * 90_000}])


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        no_key_trailers, no_key_trailer, no_key_requests_at_once, no_key_headers, long_chats, many_messages,
        slow_grammars, long_texts, long_ids, urgent, echoes, many_prompts, many_embeddings, spelled_tokens,
    )
}  # fmt: skip


def main(host: str, port: str, key: str, *names: str) -> None:
    """Run these attacks side by side, for ever."""
    os.nice(10)  # whoever attacks brings a machine of its own
    target = Target(host, int(port), key)

    def run(attack: Attack) -> None:
        for sent in cycle(list(attack(target))):
            target.send(sent)
            time.sleep(_PAUSE)

    for name in names:
        threading.Thread(target=run, args=(ATTACKS[name],)).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
