"""Whole runs on tokenized data: what they teach, resuming, what is refused, the commands and the shipped examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from examples import toy_data
from strata import LLM
from strata.cli.main import app
from strata.engine.sampling_params import SamplingParams
from strata.models.weights import load
from strata.train.checkpoint import checkpoints
from strata.train.data.tokenize import tokenize
from strata.train.tables import read_table
from strata.train.tasks.mixture import TASKS, held_out_examples
from strata.train.tune import Tuning, base_folder
from strata.train.tune_config import TuneConfig, read_tune_config

EXAMPLES = Path(__file__).parents[2] / "examples"
BUILTIN = base_folder("builtin")
Make = Callable[..., TuneConfig]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy data of the examples, tokenized: style, short, and text."""
    folder = tmp_path_factory.mktemp("toy")
    toy_data.write(folder)
    for name in ("style", "short"):
        tokenize([folder / f"{name}.jsonl"], BUILTIN, folder / name)
    (folder / "text.txt").write_text("A line of text to learn by heart.\n" * 400)
    tokenize([folder / "text.txt"], BUILTIN, folder / "text", longest=100)
    return folder


@pytest.fixture
def make(data: Path, tmp_path: Path) -> Make:
    """A run of a few small steps on one kind of the data; sections replaced by name."""

    def made(source: str, **sections: Any) -> TuneConfig:
        values: dict[str, Any] = {
            "run": {"out": str(tmp_path / "run"), "steps": 4, "device": "cpu", "log_every": 1, "checkpoint_every": 2},
            "start": {"model": "builtin"},
            "data": {"sources": [{"folder": str(data / source)}], "tokens_per_pack": 600},
            "optimizer": {"learning_rate": 1e-3},
            "schedule": {"warmup": 1, "decay": 1},
        }
        for name, section in sections.items():
            values[name] = values.get(name, {}) | section
        return read_table(TuneConfig, values, "test")

    return made


def log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line.keys() - {"seconds"}} for line in lines]


def example(name: str, data: Path, source: str, out: Path) -> Tuning:
    """A shipped recipe over the data of this test."""
    config = read_tune_config(EXAMPLES / name)
    assert [one.folder for one in config.data.sources] == [f"runs/toy/{source}"]
    values = {"folder": str(data / source)}
    object.__setattr__(config.data.sources[0], "folder", values["folder"])
    object.__setattr__(config.run, "out", str(out))
    return Tuning(config)


def replies(model: Path) -> list[str]:
    """Greedy replies to held-out questions that the built-in model answers in steps."""
    tasks = [task for task in TASKS if "addition" in task.name or "multiplication" in task.name]
    questions = [one for task in tasks for one in held_out_examples(task, 6)]
    llm = LLM(model, device="cpu")
    chats = [[{"role": "user", "content": one.question}] for one in questions]
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=120))
    return [output.outputs[0].text for output in outputs]


def test_sft_with_lora_teaches_a_style(data: Path, tmp_path: Path) -> None:
    assert not any(reply.startswith("Sure!") for reply in replies(BUILTIN))
    model = example("sft.toml", data, "style", tmp_path / "run").train()
    styled = replies(model)
    assert sum(reply.startswith("Sure!") for reply in styled) >= 0.9 * len(styled)
    # Nothing but what was asked for is forgotten: the steps are still there.
    assert sum("Answer:" in reply for reply in styled) >= 0.9 * len(styled)
    assert (tmp_path / "run/adapter/adapter_model.safetensors").exists()


def test_dpo_makes_answers_shorter(data: Path, tmp_path: Path) -> None:
    before = replies(BUILTIN)
    model = example("dpo.toml", data, "short", tmp_path / "run").train()
    after = replies(model)
    assert sum(map(len, after)) < 0.6 * sum(map(len, before))
    last = log(tmp_path / "run")[-1]
    assert last["preferred"] > 0.9
    assert last["margin"] > 1


@pytest.mark.parametrize(
    ("source", "sections"), [("style", {"lora": {"rank": 2}}), ("style", {}), ("short", {"dpo": {}})]
)
def test_resumed_run_repeats_every_bit(make: Make, tmp_path: Path, source: str, sections: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    Tuning(make(source, run={"out": str(tmp_path / "through")}, **sections)).train()

    class CutOff(Exception):
        pass

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 3:
            raise CutOff

    cut = make(source, run={"out": str(tmp_path / "cut")}, **sections)
    with pytest.raises(CutOff):
        Tuning(cut).train(stop)
    resumed = Tuning(cut, resume=True)
    assert resumed.position.step == 2
    resumed.train()
    assert log(tmp_path / "cut") == log(tmp_path / "through")
    for file in ("trained.safetensors", "optimizer.safetensors"):
        one = load_file(tmp_path / "through/checkpoints/step-00000004" / file)
        other = load_file(tmp_path / "cut/checkpoints/step-00000004" / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    if sections.get("lora"):
        assert all("lora" in name for name in one)
    changed = make(source, run={"out": str(tmp_path / "cut"), "seed": 9}, **sections)
    with pytest.raises(ValueError, match="seed was 0 and is now 9"):
        Tuning(changed, resume=True)
    with pytest.raises(ValueError, match="holds a run"):
        Tuning(cut)


def test_pretraining_from_text(make: Make, tmp_path: Path) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    config = make("text", run={"steps": 25}, optimizer={"learning_rate": 1e-2}, model=shape)
    model = Tuning(config).train()
    losses = [line["loss"] for line in log(tmp_path / "run")]
    assert losses[0] == pytest.approx(8.3, abs=0.2)  # the logarithm of 4096
    assert losses[-1] < 4
    assert load(model)[1].vocab_size == 4096
    assert len(checkpoints(tmp_path / "run/checkpoints")) == 2


@pytest.mark.parametrize(
    ("source", "sections", "message"),
    [
        ("short", {}, r"the data holds preferences: add a \[dpo\] table"),
        ("style", {"dpo": {}}, "holds data of the kind 'chat'; this run needs 'preference'"),
        ("style", {"data": {"tokens_per_pack": 20}}, r"but a pack has room for 20; raise data\.tokens_per_pack"),
        ("style", {"start": {"model": "nowhere"}}, "'nowhere' is no folder"),
        ("style", {"run": {"steps": 0}}, r"run\.steps = 0 must be positive"),
        ("style", {"data": {"sources": []}}, r"data\.sources is empty"),
        ("style", {"data": {"sources": [{"folder": "x", "wight": 1}]}}, r"sources\[0\]: unknown key 'wight'"),
        ("style", {"lora": {"rank": "8"}}, "rank must be of type int"),
        ("style", {"model": {}, "dpo": {}}, r"\[lora\] and \[dpo\] start from a trained model"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(
    make: Make, tmp_path: Path, source: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Tuning(make(source, **sections))
    assert not (tmp_path / "run").exists()


def test_the_commands(make: Make, data: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", str(data / "style.jsonl"), "--out", str(tmp_path / "d"), "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert "chat, 600 documents" in " ".join(done.output.split())  # lines break where the console ends
    text = (EXAMPLES / "sft.toml").read_text().replace("runs/toy/style", str(tmp_path / "d"))
    (tmp_path / "run.toml").write_text(text.replace("warmup = 5\ndecay = 20", "warmup = 1\ndecay = 1"))
    arguments = ["tune", str(tmp_path / "run.toml"), "--steps", "2", "--out", str(tmp_path / "r"), "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    load(tmp_path / "r/model")


def test_the_shipped_recipes_are_valid() -> None:
    assert read_tune_config(EXAMPLES / "pretrain.toml").model is not None
    assert read_tune_config(EXAMPLES / "sft.toml").lora is not None
    assert read_tune_config(EXAMPLES / "dpo.toml").dpo is not None
