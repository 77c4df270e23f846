"""What the tests of the server share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

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
    """The built-in model, served. Tests leave it idle."""
    with live_server(BUILTIN, tool_format="hermes", max_queue=64, priority_keys=("anonymous",)) as server:
        yield server


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same model without a server."""
    return LLM(BUILTIN, device="cpu", max_num_seqs=8)


@pytest.fixture
def serve_script(tokenizer: Tokenizer) -> Callable[..., AbstractContextManager[Scripted]]:
    return partial(scripted_server, tokenizer)
