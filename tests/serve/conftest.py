"""What the tests of the server share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

import strata
from strata.models.tokenizer import Tokenizer
from tests.serve.scripted import Scripted, scripted_server

BUILTIN = Path(strata.__file__).parent / "models" / "builtin"


@pytest.fixture(scope="session")
def tokenizer() -> Iterator[Tokenizer]:
    """The built-in model's."""
    with Tokenizer.load(BUILTIN) as tokenizer:
        yield tokenizer


@pytest.fixture
def serve_script(tokenizer: Tokenizer) -> Callable[..., AbstractContextManager[Scripted]]:
    return partial(scripted_server, tokenizer)
