"""The engine of a service."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strata import LLM


@pytest.fixture
def llm(engine: Callable[..., LLM]) -> LLM:
    return engine(dtype="float32")
