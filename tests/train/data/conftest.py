"""What the tests of data share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Iterator[Tokenizer]:
    with Tokenizer.load(folder) as loaded:
        yield loaded
