"""An engine on another GPU than the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.ranks import found_by_ranks

pytestmark = pytest.mark.gpu


def test_any_gpu_answers_as_the_first(tmp_path: Path) -> None:
    first, second = found_by_ranks("tests.gpu.engine.answers_of_a_gpu", 2, tmp_path, timeout=300)
    assert first["is_there"]
    assert second["is_there"]
    assert first["ids"] == second["ids"]
    assert (first["of_first"] > 0, second["of_first"]) == (True, 0)
