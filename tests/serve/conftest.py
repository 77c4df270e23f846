"""What the tests of the server share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import strata
from strata import LLM
from strata.text.tokenizer import Tokenizer
from tests.serve.live import LiveServer, live_server
from tests.serve.scripted import Scripted, scripted_server

BUILTIN = Path(strata.__file__).parent / "models" / "builtin"


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[Tokenizer]:
    """The built-in model's."""
    with Tokenizer.load(BUILTIN) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """The built-in model, served. Tests leave it idle. In float32: which requests share a step, and what of a prompt is
    cached, depends on when they come and what came before, and bfloat16 rounds by how many rows a step has."""
    settings: dict[str, Any] = {"tool_format": "hermes", "max_queue": 64, "priority_keys": ("anonymous",)}
    with live_server(BUILTIN, engine_options={"dtype": "float32"}, **settings) as server:
        yield server


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model without a server."""
    return LLM(BUILTIN, device="cpu", dtype="float32", max_num_seqs=8)


@pytest.fixture
def serve_script(tokenizer: Tokenizer) -> Callable[..., AbstractContextManager[Scripted]]:
    return partial(scripted_server, tokenizer)
