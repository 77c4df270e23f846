"""A server for the page: a real API process, and an engine that says a given text at a given pace."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import strata
from strata.serve.http.keys import KeyHash
from strata.serve.processes.worker import READY, engine_address
from strata.text.tokenizer import Tokenizer

ROOT = Path(strata.__file__).parent.parent
BUILTIN = ROOT / "strata" / "models" / "builtin"
NAME = "talkative"


@contextmanager
def talkative_server(
    folder: Path,
    text: str,
    *,
    interval: float = 0.01,
    keys: Sequence[KeyHash] = (),
    model_limit: int = 1 << 17,
    **settings: Any,
) -> Iterator[tuple[str, int]]:
    """(address, number of tokens of `text`); each reply goes on in `text` where the last one stopped, over and over.

    folder: empty. interval: seconds between two tokens. model_limit: tokens that the model takes. settings: of
    ServeSettings.
    """
    with Tokenizer.load(BUILTIN) as tokenizer:
        ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = [ids[-1], *ids[:-1]]
    engine = {"address": engine_address(folder), "interval": interval, "tokens": tokens, "max_model_len": model_limit}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        job = {
            "settings": {"model": str(BUILTIN), "served_model_names": [NAME], **settings},
            "keys": [{"name": key.name, "digest": key.digest, "salt": key.salt} for key in keys],
            "tokenizer": str(BUILTIN),
            "folder": str(folder),
            "listeners": [listener.fileno()],
        }
        stub = _start([str(ROOT / "benchmarks" / "stub_engine.py")], engine)
        api = _start(["-m", "strata.serve.processes.worker"], job, pass_fds=[listener.fileno()])
        try:
            _wait_until_ready(api, stub)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", len(ids)
        finally:
            for process in (api, stub):
                process.kill()
                process.communicate()


def _wait_until_ready(api: subprocess.Popen[str], stub: subprocess.Popen[str], seconds: float = 180.0) -> None:
    assert api.stdout is not None
    deadline = time.monotonic() + seconds
    while not select.select([api.stdout], [], [], 0.1)[0]:
        assert stub.poll() is None, "the engine has ended"
        assert time.monotonic() < deadline, f"not ready after {seconds:g} s"
    assert api.stdout.readline().strip() == READY


def _start(arguments: list[str], told: dict[str, Any], pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    """A Python process that has been told its job; its standard input stays open, since it ends with it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        pass_fds=pass_fds,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(told) + "\n")
    process.stdin.flush()
    return process
