"""What the shipped recipes of fine-tuning teach the built-in model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from examples import toy_data
from strata import LLM
from strata.comm.launch import World
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import BUILTIN_FOLDER
from strata.train.config import read_train_config
from strata.train.data.tokenize import tokenize
from strata.train.finish import save_model
from strata.train.tasks.mixture import TASKS, held_out_examples
from strata.train.trainer import Trainer
from tests.train.conftest import log

EXAMPLES = Path(__file__).parents[3] / "examples"
ALONE = World(0, 0, 1, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of the toy data, tokenized as the recipes say."""
    folder = tmp_path_factory.mktemp("toy")
    toy_data.write(folder)
    for name in ("style", "short"):
        tokenize([folder / f"{name}.jsonl"], BUILTIN_FOLDER, folder / name, longest=1024)
    return folder


def trained(recipe: str, data: Path, out: Path) -> Path:
    """The model that a recipe leaves, from data of this test."""
    assert f"runs/toy/{data.name}" in (EXAMPLES / recipe).read_text()
    values = {"run.out": f'"{out}"', "run.device": "cpu", "data.sources": f'[{{ folder = "{data}" }}]'}
    run = Trainer(read_train_config(EXAMPLES / recipe, list(values.items())), ALONE)
    run.train()
    return save_model(run)


def replies(model: Path) -> list[str]:
    """Greedy replies to held-out questions that the built-in model answers in steps."""
    tasks = [task for task in TASKS if "addition" in task.name or "multiplication" in task.name]
    questions = [one for task in tasks for one in held_out_examples(task, 6)]
    chats = [[{"role": "user", "content": one.question}] for one in questions]
    outputs = LLM(model, device="cpu").chat(chats, SamplingParams(temperature=0.0, max_tokens=120))
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def untaught() -> list[str]:
    """The replies of the built-in model."""
    return replies(BUILTIN_FOLDER)


def test_sft_with_lora_teaches_a_style(toy: Path, tmp_path: Path, untaught: list[str]) -> None:
    assert not any(reply.startswith("Sure!") for reply in untaught)
    styled = replies(trained("sft.toml", toy / "style", tmp_path / "run"))
    assert sum(reply.startswith("Sure!") for reply in styled) >= 0.9 * len(styled)
    # Nothing but what was asked for is forgotten: the steps are still there.
    assert sum("Answer:" in reply for reply in styled) >= 0.9 * len(styled)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()


@pytest.mark.long
def test_dpo_makes_answers_shorter(toy: Path, tmp_path: Path, untaught: list[str]) -> None:
    after = replies(trained("dpo.toml", toy / "short", tmp_path / "run"))
    assert sum(map(len, after)) < 0.6 * sum(map(len, untaught))
    # They are answers still: a rate that is too high makes a model that stammers, or never ends.
    assert sum(re.fullmatch(r"Answer: \d[^A]*", reply) is not None for reply in after) >= 2 / 3 * len(after)
    last = log(tmp_path / "run")[-1]
    assert last["preferred"] > 0.9
    assert last["margin"] > 1
