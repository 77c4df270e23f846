"""A server for the clients of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.running import Running, running

KEY = "a-key-for-tests-only"

collect_ignore = ["npm", "openai2", "frameworks", "loops"]  # what is installed there, and programs that need it


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """`strata serve` with the built-in model and a key. In float32: which prompts of a request share a step depends on
    when they come, and bfloat16 rounds by how many rows it has, so that a seed would not always repeat itself."""
    with running("--dtype", "float32", key=KEY, environment={"STRATA_API_KEY": KEY}) as server:
        yield server
