"""Runs on a GPU: the same losses as on the CPU, and a resumed run that repeats every bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples import toy_data
from strata.comm.launch import World
from strata.files.toml_tables import read_table
from strata.models.folder import BUILTIN_FOLDER
from strata.train.config import TrainConfig, ValidationConfig
from strata.train.data.tokenize import tokenize
from strata.train.steps.parallel_step import ParallelStep
from strata.train.tasks.exercises import write_exercises
from strata.train.tasks.mixture import document
from strata.train.tasks.vocabulary import make_tokenizer, write_tokenizer
from strata.train.trainer import Trainer
from tests.train.conftest import cut_off, log

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# No multiple of 512, so that deterministic or not, attention takes the kernels of packed documents.
LENGTH = 256
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and exercises; the toy data's chats and preferences."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def write_data(folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    write_tokenizer(make_tokenizer((document(3, index) for index in range(300)), 800), folder / "tokenizer", 1024)
    write_exercises(folder / "exercises", 4000, tokenizer_folder=folder / "tokenizer", seed=3)
    toy_data.write(folder)
    for name in ("style", "short"):
        tokenize([folder / f"{name}.jsonl"], BUILTIN_FOLDER, folder / name)
    (folder / "text.txt").write_text(" ".join(" ".join(map(str, divmod(7 * n, 11))) for n in range(6000)))
    tokenize([folder / "text.txt"], folder / "tokenizer", folder / "text", longest=LENGTH)


def pretraining(data: Path, out: Path, device: str, steps: int = 20, learning_rate: float = 5e-3) -> TrainConfig:
    values: dict[str, Any] = {
        "run": {"out": str(out), "steps": steps, "device": device, "log_every": 1, "checkpoint_every": 10},
        "start": {"tokenizer": str(data / "tokenizer")},
        "model": MODEL,
        "data": {"sources": [{"folder": str(data / "exercises")}], "tokens_per_pack": 8192, "packs_per_step": 2},
        "optimizer": {"learning_rate": learning_rate},
        "schedule": {"warmup": 2, "decay": 2},
    }
    return read_table(TrainConfig, values)


def tuning(data: Path, out: Path, device: str, source: str, sections: dict[str, Any]) -> TrainConfig:
    """Of the built-in model, gently."""
    values: dict[str, Any] = {
        "run": {"out": str(out), "steps": 8, "device": device, "log_every": 1, "checkpoint_every": 4},
        "start": {"model": "builtin"},
        "data": {"sources": [{"folder": str(data / source)}], "tokens_per_pack": 2048},
        "optimizer": {"learning_rate": 1e-4},
        "schedule": {"warmup": 1, "decay": 1},
    }
    return read_table(TrainConfig, values | sections)


def trainer(config: TrainConfig, *, resume: bool = False) -> Trainer:
    device = torch.device(config.run.device, 0) if config.run.device == "cuda" else torch.device("cpu")
    return Trainer(config, World(0, 0, 1, device, None), resume=resume)


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in log(folder)]


def norms(folder: Path) -> list[float]:
    return [line["gradient_norm"] for line in log(folder)]


def repeats_every_bit(through: TrainConfig, cut: TrainConfig, stop: int, resumes: int, last: str) -> None:
    """A run, and one that was cut off after `stop` steps and resumed from a checkpoint of `resumes`."""
    trainer(through).train()
    cut_off(trainer(cut), stop)
    resumed = trainer(cut, resume=True)
    assert resumed.position.step == resumes
    resumed.train()
    folders = [Path(one.run.out) for one in (through, cut)]
    assert losses(folders[0]) == losses(folders[1])
    assert norms(folders[0]) == norms(folders[1])
    one, other = (load_file(folder / "checkpoints" / last / "rank-00000.safetensors") for folder in folders)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_resumed_pretraining_repeats_every_bit(data: Path, tmp_path: Path) -> None:
    through, cut = (pretraining(data, tmp_path / name, "cuda") for name in ("through", "cut"))
    repeats_every_bit(through, cut, 13, 10, "step-00000020")


def test_loss_follows_the_cpu(data: Path, tmp_path: Path) -> None:
    # A gentle rate: at a high one, bfloat16 and float32 part ways within a few steps.
    on_cpu, on_gpu = (pretraining(data, tmp_path / device, device, 10, 1e-3) for device in ("cpu", "cuda"))
    for config in (on_cpu, on_gpu):
        trainer(config).train()
    found = losses(tmp_path / "cuda")
    assert found == pytest.approx(losses(tmp_path / "cpu"), rel=0.02)
    assert found[-1] < 0.95 * found[0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_documents_of_one_length_are_recorded_and_follow_the_cpu(
    data: Path, tmp_path: Path, deterministic: bool
) -> None:
    """Through the run, which collects no garbage between steps and writes checkpoints of what a CUDA graph changes."""
    found = []
    for device in ("cpu", "cuda"):
        config = pretraining(data, tmp_path / device, device, 12, 1e-3)
        text = replace(config.data, sources=(replace(config.data.sources[0], folder=str(data / "text")),))
        text = replace(text, tokens_per_pack=2 * LENGTH, packs_per_step=1)
        run = trainer(replace(config, data=text, run=replace(config.run, deterministic=deterministic)))
        run.train()
        assert isinstance(run.stepper, ParallelStep)
        assert (run.stepper._captured is not None) == (device == "cuda")
        found.append(losses(tmp_path / device))
    assert found[1] == pytest.approx(found[0], rel=0.02)
    assert found[1][-1] < 0.95 * found[1][0]


def test_validation_between_recorded_steps_changes_none_of_their_bits(data: Path, tmp_path: Path) -> None:
    """It frees a CUDA graph, and the next step makes another."""
    found = []
    for every in (3, 12):
        config = pretraining(data, tmp_path / str(every), "cuda", 12, 1e-3)
        text = replace(config.data, sources=[replace(config.data.sources[0], folder=str(data / "text"))])
        text = replace(text, tokens_per_pack=2 * LENGTH, packs_per_step=1)
        trainer(replace(config, data=text, validation=ValidationConfig(share=0.1, every=every))).train()
        lines = log(tmp_path / str(every))
        assert [line["step"] for line in lines if "validation_loss" in line] == list(range(every, 13, every))
        found.append((losses(tmp_path / str(every)), norms(tmp_path / str(every)), lines[-1]["validation_loss"]))
    assert found[0] == found[1]
    assert found[0][2] == pytest.approx(found[0][0][-1], rel=0.2)


TUNED: list[tuple[str, dict[str, Any]]] = [("style", {"lora": {"rank": 4}}), ("style", {}), ("short", {"dpo": {}})]


@pytest.mark.parametrize(("source", "sections"), TUNED)
def test_fine_tuning_follows_the_cpu_and_repeats_every_bit(
    data: Path, tmp_path: Path, source: str, sections: dict[str, Any]
) -> None:
    on_cpu, on_gpu, cut = (
        tuning(data, tmp_path / name, device, source, sections)
        for name, device in (("cpu", "cpu"), ("through", "cuda"), ("cut", "cuda"))
    )
    repeats_every_bit(on_gpu, cut, 6, 4, "step-00000008")
    trainer(on_cpu).train()
    assert losses(tmp_path / "through") == pytest.approx(losses(tmp_path / "cpu"), rel=0.1)
