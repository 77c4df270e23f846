"""What is drawn anew, and what is drawn again."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata import LLM, SamplingParams

PROMPT = {"prompt_token_ids": [5, 6, 7]}
FREE = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=4)


def drawn(folder: Path, params: SamplingParams, seed: int | None) -> list[list[int]]:
    """What a new engine draws, twice in a row."""
    llm = LLM(folder, device="cpu", dtype="float32", num_pages=20, seed=seed)
    return [output.outputs[0].token_ids for output in llm.generate([PROMPT] * 2, params, use_tqdm=False)]


def test_a_new_engine_draws_anew_unless_it_is_given_a_seed(folder: Path) -> None:
    assert drawn(folder, FREE, None) != drawn(folder, FREE, None)
    seeded = drawn(folder, FREE, 3)
    assert seeded == drawn(folder, FREE, 3)
    assert seeded != drawn(folder, FREE, 2**63 - 1)
    assert seeded[0] != seeded[1], "requests of one engine draw for themselves"


def test_a_request_with_a_seed_draws_the_same_in_every_engine(folder: Path) -> None:
    first, again = drawn(folder, SEEDED, None)
    assert [first, again] == drawn(folder, SEEDED, None) == [first, first]


@pytest.mark.parametrize("seed", [0.5, "3", True, 2**63])
def test_a_seed_that_is_none_is_refused(folder: Path, seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be an integer"):
        LLM(folder, device="cpu", seed=seed)


def test_dummy_weights_are_the_same_in_every_engine(folder: Path) -> None:
    made = [LLM(folder, device="cpu", dtype="float32", num_pages=20, load_format="dummy") for _ in range(2)]
    first, second = (dict(llm.engine.model.named_parameters()) for llm in made)
    assert all(bool((first[name] == second[name]).all()) for name in first)
