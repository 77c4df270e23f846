"""What the tests of ranks share."""

from __future__ import annotations

import pytest

from strata.engine.program.program import StepChoice, StepProgram
from strata.engine.program.shape import StepShape


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """Of each step that this process runs, its variant, its tokens, and whether the rank runs a share of them."""
    noted: list[tuple[str, int, bool]] = []
    choose = StepProgram.choose

    def noting(program: StepProgram, shape: StepShape) -> StepChoice:
        choice = choose(program, shape)
        noted.append((choice.variant.name, shape.tokens, choice.shape.share is not None))
        return choice

    monkeypatch.setattr(StepProgram, "choose", noting)
    return noted
