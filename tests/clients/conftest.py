"""A server for the clients of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.running import Running, running

KEY = "a-key-for-tests-only"

collect_ignore = ["npm", "openai2", "frameworks", "loops"]  # what is installed there, and programs that need it


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """`strata serve` with the built-in model and a key."""
    with running(key=KEY, environment={"STRATA_API_KEY": KEY}) as server:
        yield server
