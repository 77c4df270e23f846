"""DPO's reference on several ranks: the numbers of one process, and nobody waits while another does it all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from strata.comm import collectives
from strata.comm.launch import World
from strata.files.toml_tables import read_table
from strata.train.config import TrainConfig
from strata.train.data.pack import PackedBatch
from strata.train.steps.parallel_step import ParallelStep
from strata.train.trainer import Trainer
from tests.parallel.ranks import run_ranks
from tests.train.tiny_run import Table, write_files


def events(world: World, folder: Path, table: Table, alone: Table) -> list[str]:
    """What this rank does until the first step could begin: "pass" of the model, "wait" for the other ranks; and how
    it begins again from what the first beginning has left. One rank then begins a run of its own.
    """
    found: list[str] = []
    logprobs, wait = ParallelStep.logprobs, collectives.Pending.wait

    def noted_logprobs(self: ParallelStep, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        found.extend(["pass"] * len(batches))
        return logprobs(self, batches)

    def noted_wait(self: collectives.Pending) -> torch.Tensor:
        found.extend(["wait"] * len(self.works))
        return wait(self)

    ParallelStep.logprobs, collectives.Pending.wait = noted_logprobs, noted_wait
    config = read_table(TrainConfig, table)
    Trainer(config, world)
    found.append("again")
    Trainer(config, world)
    told = found.copy()
    if world.is_main:
        Trainer(read_table(TrainConfig, alone), World(0, 0, 1, world.device, None))
    return told


def test_ranks_share_the_reference_and_meet_after_every_batch(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files")
    data = {"sources": [{"folder": str(files.pairs)}]}
    table = files.tuning(tmp_path / "three", data=data, dpo={"beta": 0.3}, parallel={"dp": 3})
    table["data"]["packs_per_step"] = 3
    alone = files.tuning(tmp_path / "one", data=data, dpo={"beta": 0.3})
    ranks = run_ranks(events, 3, tmp_path, table=table, alone=alone)
    passes = []
    for found in ranks:
        first, again = " ".join(found).split("again")
        assert "pass pass" not in first, "one batch between two meetings is the longest that another rank waits"
        assert "pass" not in again
        passes.append(first.count("pass"))
    assert max(passes) - min(passes) <= 1
    one, three = (load_file(tmp_path / name / "reference.safetensors") for name in ("one", "three"))
    assert sum(passes) > 6
    assert one.keys() == three.keys()
    assert all(torch.equal(three[key], values) and len(values) == 100 for key, values in one.items())
