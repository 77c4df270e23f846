"""Runs over two ranks that cannot begin: every rank says why, it is shown once, and nothing is tried again."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from strata.files.toml_tables import read_table
from strata.train.config import TrainConfig
from strata.train.settings import sole_run
from strata.train.start import check_run
from strata.train.trainer import Trainer
from tests.parallel.ranks import run_ranks
from tests.train.tiny_run import LLAMA, Files, Table, write_files, write_toml
from tests.train.train_ranks import ALONE, Command, refused, train

# By run, what each rank says of it.
REASONS = {
    "ranks": r"dp 3 .* = 3 ranks, but 2 run; change one of them or the ranks",
    "heads": r"tp = 2 does not divide num_key_value_heads = 1; for this model tp may be 1",
    "stages": r"pp = 2 with schedule 'interleaved' has 4 stages, more than the model's 2 layers",
    "packs": r"packs_per_step = 3 is not divisible by the 2 data-parallel ranks",
    "packed": r"tp = 2 would divide packed weights among ranks, .*; set tp = 1 and use dp, shard, cp or pp, or keep",
    "rope": r"has a document of \d+ tokens, but the model reads at most 16 \(max_position_embeddings\)",
    "folder": r"holds a run \(step-00000003\); go on with --resume, or choose another folder with --run\.out",
    "model": r"cannot resume .*: model\.intermediate_size was 48 and is now 64; restore it",
    "shard": r"is damaged: .*00001\.tokens\.npy.* \(1 of 4 shards: .*00001\); .* or set skip_corrupt",
    "shard skipped": "",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


def damaged(files: Files, folder: Path) -> Path:
    """The data with one other byte in its second shard."""
    shutil.copytree(files.text, folder)
    shard = sorted(folder.glob("*.tokens.npy"))[1]
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    return folder


def test_every_rank_says_why_and_most_is_told_before_they_start(files: Files, tmp_path: Path) -> None:
    out, bad = tmp_path / "out", {"sources": [{"folder": str(damaged(files, tmp_path / "damaged"))}]}
    trained = files.table(tmp_path / "trained", parallel={"dp": 2})
    train(ALONE, {section: values for section, values in trained.items() if section != "parallel"})
    other = trained | {"model": LLAMA | {"intermediate_size": 64}}
    dp = {"dp": 2}
    runs: dict[str, Table] = {
        "ranks": {"table": files.table(out, parallel={"dp": 3})},
        "heads": {"table": files.table(out, parallel={"tp": 2}, model={"num_key_value_heads": 1})},
        "stages": {"table": files.table(out, parallel={"pp": 2, "schedule": "interleaved"})},
        "packs": {"table": files.table(out, parallel=dp, data={"packs_per_step": 3})},
        "packed": {"table": files.tuning(out, lora={"rank": 2, "quantization": "int4"}, parallel={"tp": 2})},
        "rope": {"table": files.table(out, parallel=dp, model={"max_position_embeddings": 16})},
        "folder": {"table": trained},
        "model": {"table": other, "resume": True},
        "shard": {"table": files.table(out, parallel=dp, data=bad)},
        "shard skipped": {"table": files.table(out, parallel=dp, data=bad | {"skip_corrupt": True})},
    }
    ranks = run_ranks(refused, 2, tmp_path, runs=runs)
    for name, reason in REASONS.items():
        first, second = (one[name] for one in ranks)
        assert first == second
        assert bool(first["reason"]) == bool(reason)
        assert re.search(reason, first["reason"]), first
        if name in ("model", "shard"):  # checkpoints and checksums are read by the ranks
            continue
        with pytest.raises(ValueError, match=reason) if reason else nullcontext():
            check_run(read_table(TrainConfig, runs[name]["table"]), 2, resume=False)
    assert any(re.search(r"goes without damaged shards: .*00001", line) for line in ranks[0]["shard skipped"]["said"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel.tp", 2, "--model.num_key_value_heads", 1], "tp = 2 does not divide num_key_value_heads = 1"),
        (["--run.device", "cuda"], "this machine has no CUDA device; use 'cpu' or 'auto'"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is hidden as on Linux")
def test_the_command_says_it_once_and_does_not_try_again(
    files: Files, tmp_path: Path, arguments: list[object], message: str
) -> None:
    toml = write_toml(tmp_path / "run.toml", files.table(tmp_path / "run"))
    with Command(toml, "--ranks", 2, "--restarts", 3, *arguments) as command:
        code, said = command.end()
    assert code == 1
    assert [message in line for line in said.splitlines()] == [True], said
    assert not (tmp_path / "run").exists()


def test_two_runs_at_once_in_one_folder(files: Files, tmp_path: Path) -> None:
    """The second is refused before it touches what the first is writing."""
    config = read_table(TrainConfig, files.table(tmp_path))
    writing = tmp_path / "checkpoints/.step-00000003.part"
    writing.mkdir(parents=True)
    with sole_run(tmp_path), pytest.raises(ValueError, match=f"another process trains in {tmp_path}; wait"):
        Trainer(config, ALONE, resume=True)
    assert writing.exists()
    torch.set_num_threads(1)
    run = Trainer(config, ALONE, resume=True)
    assert not writing.exists()
    with sole_run(tmp_path), pytest.raises(ValueError, match="another process trains"):
        run.train()
    run.train()
    assert run.position.step == 3
