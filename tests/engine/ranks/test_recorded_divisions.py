"""Recorded steps whose tokens ranks divide, over gloo, where a recording is a function that is called again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strata import LLM
from strata.cache.staging import Staging
from strata.comm.launch import World
from strata.comm.mesh import Axis, Mesh
from strata.engine.program import sizes as sizes_of_steps
from strata.engine.program.sizes import divided_buckets, recorded_sizes
from strata.engine.ranks.token_division import TokenDivision
from strata.engine.runner import Runner
from tests.engine.program.programs import step_program
from tests.engine.program.test_recorded_steps import LONGEST, MOST, OPTIONS, Replayed, ids
from tests.parallel.ranks import run_ranks


def divided_steps(world: World, folder: Path, *, model: str, cases: list[tuple[bool, int]]) -> list[dict[str, Any]]:
    axis = Mesh.of(world, {"cp": world.size}).axis("cp")
    return [of_engine(axis, model, *case) for case in cases]


def of_engine(axis: Axis, model: str, library: bool, most: int) -> dict[str, Any]:
    """What a rank draws in an engine that replays shares of steps, whose device has memory of its own as on CUDA, and
    how many steps it ran in which way. most: rows of the largest share that is recorded."""
    llm = LLM(Path(model), **OPTIONS)
    plain: Any = llm.engine.loop._runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes_of_steps, "LIBRARY_TOKENS", 16)
        patch.setattr(sizes_of_steps, "MAX_PROMPTS", 3)
        patch.setattr(Staging, "target", lambda self, size: torch.full((size,), -77, dtype=torch.int32))
        patch.setattr(Staging, "send", lambda self, target: target.copy_(self.host[: len(target)]))
        division, replayed = TokenDivision.on("cpu", axis.size, axis.index), Replayed()
        program = replace(step_program(llm.engine.model, target={"context": axis}), division=division)
        runner: Any = Runner(program, plain.pool, plain._config, torch.device("cpu"))
        runner._recordings = lambda: replayed
        tables = runner._tables
        tables.on_device, tables._shared = torch.zeros(tables.rows.shape, dtype=torch.int32), False
        sizes = recorded_sizes(MOST, LONGEST, 10**6, library, division=division)
        recorded = runner.record([size for size in sizes if size.ranks == 1 or size.tokens <= most], all_of_them=True)
        llm.engine.loop._runner = runner
        launched = []
        launch = runner._launch_eager
        runner._launch_eager = lambda plan, step, *more: launched.append(step) or launch(plan, step, *more)
        drawn = ids(llm)
    ran = [key[0] for key in replayed.replayed if key[1] == "run"]
    return {
        "ids": drawn,
        "shares": sorted({(size.tokens, size.sequences, size.draws) for size in ran if size.ranks > 1}),
        "prompts": sorted({size.prompts or 0 for size in ran if size.ranks > 1}),
        "divided": sum(size.ranks > 1 for size in ran),
        "whole": sum(size.ranks == 1 for size in ran),
        "launched": sum(hasattr(one, "shares") for one in launched),
        "uncounted": len(launched) - recorded.unrecorded["too_large"],
        "tables": torch.equal(tables.on_device, torch.from_numpy(tables.rows)),
        "lacking": len(recorded.lacking),
    }


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, [(False, 48), (True, 48), (True, 32)]), (3, [(True, 32)])], ids=["2 ranks", "3 ranks"]
)
def test_shares_draw_what_one_rank_draws(
    ranks: int, cases: list[tuple[bool, int]], folder: Path, tmp_path: Path
) -> None:
    ran = run_ranks(divided_steps, ranks, tmp_path, model=str(folder), cases=cases)
    wanted = ids(LLM(folder, **OPTIONS))
    for (library, most), *found in zip(cases, *ran, strict=True):
        all_are_recorded = most == LONGEST // ranks
        for rank in found:
            assert rank["ids"] == wanted
            assert rank["tables"], "the device would read other pages than the host's"
            assert rank["lacking"] == 0
            assert rank["whole"] > 20
            assert rank["divided"] > (10 if all_are_recorded else 0)
            assert (rank["launched"] > 5) == (not all_are_recorded)
            assert rank["uncounted"] == 0
            assert rank["prompts"] == ([0, 3] if library and all_are_recorded else [3] if library else [0])
        for name in ("shares", "divided", "launched"):
            assert len({str(rank[name]) for rank in found}) == 1


def test_sizes_of_shares_begin_with_the_shortest_step_and_hold_the_largest() -> None:
    for ranks in (2, 4, 8):
        division = TokenDivision.on("cuda", ranks, 0)
        sizes = recorded_sizes(256, 8192, 8 * 10**9, library=True, division=division)
        shares = [size for size in sizes if size.ranks > 1]
        assert {size.ranks for size in shares} == {ranks}
        assert min(size.tokens for size in shares) * ranks == division.least
        assert max(size.tokens for size in shares) * ranks == 8192
        assert max(size.draws for size in shares) == 256
        assert all(size.sequences > size.draws for size in shares)
        largest = division.largest(8192, 256)
        assert all(size.size <= largest.size for size in shares)
        whole = [size for size in sizes if size.ranks == 1]
        assert whole == recorded_sizes(256, 8192, 8 * 10**9, library=True)
    assert not divided_buckets(256, 255, TokenDivision.on("cuda", 2, 0), library=True)
    # 16 rows have no room for 16 sequences and padding.
    assert not divided_buckets(20, 16, TokenDivision.on("cpu", 2, 0), library=True)
    # Where cuDNN does not attend, as many rows as of a whole step.
    large = recorded_sizes(64, 8192, 8 * 10**9, library=False, division=TokenDivision.on("cuda", 2, 0))
    assert max(size.tokens for size in large if size.ranks > 1) == 2048
