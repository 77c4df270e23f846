"""`strata train` as it is typed: whole runs, values in place of the file's, estimates, traces."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors import SafetensorError
from typer.testing import CliRunner

from strata.cli.main import app
from strata.models.folder import BUILTIN_FOLDER
from strata.models.weights import load
from strata.train.config import RECOMPUTE
from strata.train.data.tokenize import tokenize
from strata.train.log.json_lines import JsonLines
from strata.train.tasks.exercises import write_exercises

EXAMPLES = Path(__file__).parents[2] / "examples"
Train = Callable[..., Result]

RUN = """
[run]
out = "{folder}/run"
steps = 6
device = "cpu"
log_every = 1
checkpoint_every = 3

[start]
tokenizer = "{folder}/data/tokenizer"

[model]
architectures = ["LlamaForCausalLM"]
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 1024
tie_word_embeddings = true

[data]
sources = [{{ folder = "{folder}/data" }}]
tokens_per_pack = 600

[optimizer]
learning_rate = 5e-3

[schedule]
warmup = 2
decay = 2
"""


@pytest.fixture(scope="module")
def exercises(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exercises")
    write_exercises(folder / "data", 200, vocab_size=600, tokenizer_documents=200)
    return folder / "data"


@pytest.fixture
def train(exercises: Path, tmp_path: Path) -> Train:
    """The command with a small run's file and further arguments."""
    (tmp_path / "data").symlink_to(exercises)
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), *arguments])

    return run


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_command_trains_evaluates_and_exports(train: Train, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    evaluate = ("--evaluate.examples", "1", "--evaluate.max_tokens", "4", "--export.folder", str(exported))
    result = train("--run.steps", "4", *evaluate)
    assert result.exit_code == 0, result.output
    names = {path.name for path in exported.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "training.jsonl", "recipe.json"} <= names
    accuracy = json.loads((exported / "accuracy.json").read_text())
    assert accuracy["two-digit addition"]["total"] == 1
    assert accuracy == json.loads((tmp_path / "run/accuracy.json").read_text())
    card = (exported / "MODEL_CARD.md").read_text()
    assert "no general assistant" in card
    assert "4 steps" in card
    assert re.search(r"\| two-digit addition \| [01] \| 1 \|", card)
    assert json.loads((exported / "recipe.json").read_text())["run"]["steps"] == 4
    assert (exported / "training.jsonl").read_text() == (tmp_path / "run/log.jsonl").read_text()
    load(exported)
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4]
    # What people see: each line of the log, then the model and its scores.
    assert re.search(r"step 1 of 4, \d+ s left +loss \d", result.output)
    assert re.search(r"step 4 of 4 +loss \d\.\d{4} +learning_rate 2\.50e-03 +gradient_norm \d", result.output)
    assert "Held-out accuracy" in result.output


def test_a_run_by_epochs_that_validation_has_ended(train: Train, tmp_path: Path) -> None:
    """Whose steps only its data tells."""
    # Nothing gains as much, but for the first evaluation on none.
    validation = ("--validation.share", "0.1", "--validation.every", "1", "--validation.patience", "1")
    epochs = ("--run.epochs", "0.2", "--schedule.decay", "0", *validation, "--validation.min_delta", "100")
    first = train(*epochs)
    assert first.exit_code == 0, first.output
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2]
    assert re.search(r"step 2 of (?!2 )\d+, ", first.output)
    assert "early stopping: no validation loss below" in first.output
    again = train(*epochs, "--resume")
    assert "step 2 already, early stopping has ended it; train on with a larger --validation.patience" in again.output
    late = train(*epochs, "--run.out", str(tmp_path / "other"), "--profile", "500-501")
    assert re.search(r"the steps to profile, 500-501, are none of the \d+ steps of this run", str(late.exception))


def test_a_run_goes_on_where_it_was(train: Train, tmp_path: Path) -> None:
    assert train("--run.steps", "3", "--schedule.decay", "0").exit_code == 0
    again = train("--run.steps", "3", "--schedule.decay", "0")
    said = "holds a run (step-00000003); go on with --resume, or choose another folder with --run.out"
    assert said in str(again.exception)
    assert train("--run.steps", "5", "--schedule.decay", "0", "--resume").exit_code == 0
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4, 5]
    shorter = train("--run.steps", "3", "--schedule.decay", "0", "--resume")
    assert shorter.exit_code == 0, shorter.output
    assert "run is at step 5 already, no step is left; train on with a larger --run.steps" in shorter.output
    late = train("--run.steps", "9", "--resume", "--profile", "2-4")
    assert str(late.exception) == "the steps to profile, 2-4, are done: this run goes on from step 5"


@pytest.mark.parametrize(("step", "then"), [(2, "no checkpoint was written yet"), (5, "--resume goes on from step 3")])
def test_an_interrupt_says_how_to_go_on(train: Train, monkeypatch: pytest.MonkeyPatch, step: int, then: str) -> None:
    write = JsonLines.write

    def interrupted(log: JsonLines, number: int, values: Mapping[str, Any]) -> None:
        write(log, number, values)
        if number == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(JsonLines, "write", interrupted)
    result = train()
    assert result.exit_code == 130
    assert result.output.rstrip().endswith(f"strata: interrupted; {then}")


@pytest.mark.parametrize("arguments", [(), ("--lora.rank", "2")])
def test_a_model_that_could_not_be_written_is_written_by_a_resumed_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    if arguments:
        chats = tmp_path / "run.toml"
        table = re.sub(r"(?s)\[model\].*?\[data\]", "[data]", chats.read_text()).replace("tokenizer =", "model =")
        assert train("--run.out", str(tmp_path / "base")).exit_code == 0
        chats.write_text(table.replace(f"{tmp_path}/data/tokenizer", f"{tmp_path}/base/model"))

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("strata.models.save.save_file", full)
        failed = train(*arguments)
    assert failed.exit_code == 1
    said = r"/model: No space left on device; the steps up to 6 are in a checkpoint: make room, and --resume"
    assert re.search(said, str(failed.exception))
    assert not (tmp_path / "run/model").exists()
    again = train(*arguments, "--resume")
    assert again.exit_code == 0, again.output
    load(tmp_path / "run/model")


def test_values_are_replaced_however_they_are_written(train: Train, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    # As other options are written, too: --run.log-every.
    words = "--run.steps=2 --schedule.warmup 1 --schedule.decay 1 --run.log-every 1 --optimizer.name muon"
    result = train(f"--run.out={other}", *f"{words} --model.vocab_size 640 --model.attention_bias true".split())
    assert result.exit_code == 0, result.output
    assert [line["step"] for line in log(other)] == [1, 2]
    assert not (tmp_path / "run").exists()
    _, config = load(other / "model")
    assert config.vocab_size == 640


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--run.steps", "--run.steps has no value; write --run.steps VALUE"),
        ("--run.steps --resume", "--run.steps has no value; write --run.steps VALUE"),
        ("--steps 3", "'--steps' is unknown; a value of the file is replaced by --SECTION.KEY VALUE"),
        ("run.steps 3", "'run.steps' is unknown"),
        ("--run.stepz 3", "run: unknown key 'stepz'"),
        ("--walk.steps 3", "unknown key 'walk'"),
        ("--run.steps x", "run: steps must be of type int, got 'x'"),
        ("--run.seed -x", "run: seed must be of type int, got '-x'"),
        ("--profile a-b", "--profile a-b must be a step or a first and a last one, such as 10-12"),
        ("--profile 5-3", "--profile 5-3 has none of the steps of this run, 1-6"),
        ("--profile 90-92", "--profile 90-92 has none of the steps of this run, 1-6"),
        ("--model.num_hidden_layerz 3", "is num_hidden_layers meant?"),
        (
            "--start.tokenizer nowhere",
            "start.tokenizer 'nowhere' does not exist; give a model folder, org/model of the",
        ),
        ("--estimate --hardware h900", "h900"),
        ("--data.tokens_per_pack 10", "raise data.tokens_per_pack"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(train: Train, tmp_path: Path, arguments: str, message: str) -> None:
    result = train(*arguments.split())
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "run").exists()


def test_a_value_may_begin_with_a_dash_and_the_file_stands_first(train: Train, tmp_path: Path) -> None:
    result = train("--run.seed", "-3", "--run.steps", "4")
    assert result.exit_code == 0, result.output
    state = json.loads((tmp_path / "run/checkpoints/step-00000004/state.json").read_text())
    assert state["recipe"]["run"]["seed"] == -3
    result = CliRunner().invoke(app, ["train", "--run.steps", "4", str(tmp_path / "run.toml")])
    assert str(result.exception) == "--run.steps stands before the file; write strata train FILE --SECTION.KEY VALUE"


def test_an_estimate_trains_nothing(train: Train, tmp_path: Path) -> None:
    result = train("--estimate", "--hardware", "h200")
    assert result.exit_code == 0
    title, *ways = result.output.splitlines()
    assert title.startswith("one rank (one rank: nothing to divide), 1 x 600 tokens a replica, bf16, NVIDIA H200")
    assert [way[:2] for way in ways] == ["* ", "  ", "  ", "  "]
    assert [way[2:].split(":")[0] for way in ways] == [f"recompute {name}" for name in RECOMPUTE]
    figures = r"\d GiB \(state .*\); likely \d+\.\d ms .*, [\d,]+ tokens/s, MFU \d+\.\d%; at least \d+\.\d ms"
    assert all(re.search(figures, way) for way in ways)
    eight = ["--estimate", "--hardware", "h200", "--ranks", "8", "--data.packs_per_step", "8"]
    many = train(*eight).output
    assert many.startswith("shard 8 (ZeRO-1 with shard 8: ")
    muon = train("--estimate", "--hardware", "h200", "--optimizer.name", "muon").output.splitlines()
    assert muon[:-1] == [title, *ways]
    assert "estimated with AdamW" in muon[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("steps", "traced"), [("2-3", 2), ("4", 1), ("6-9", 1)])
def test_a_profile_is_a_trace_and_a_table(train: Train, tmp_path: Path, steps: str, traced: int) -> None:
    result = train("--profile", steps)
    assert result.exit_code == 0, result.output
    with gzip.open(tmp_path / "run/profile/trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation" and event.get("ph") == "X"]
    assert names.count("strata.step") == traced
    assert {"strata.data", "strata.passes", "strata.reduce", "strata.update"} <= set(names)
    table = result.output[result.output.index("a step, mean of") :]
    assert table.startswith(f"a step, mean of {traced}")
    shares = {row.split()[0]: row.split()[2] for row in table.splitlines()[1:10]}
    assert shares["total"] == "100.0%"
    assert float(shares["products"][:-1]) > 1
    assert float(shares["optimizer"][:-1]) > 0
    assert "open" in table
    assert "https://ui.perfetto.dev" in table


def test_fine_tuning_from_files_to_a_model(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Sure!"}]}
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokenize([tmp_path / "chats.jsonl"], BUILTIN_FOLDER, tmp_path / "data")
    words = f"--run.steps 2 --run.out {tmp_path}/run --run.device cpu --schedule.warmup 1 --schedule.decay 1".split()
    arguments = [*words, "--data.sources", f'[{{ folder = "{tmp_path}/data" }}]']
    result = CliRunner().invoke(app, ["train", str(EXAMPLES / "sft.toml"), *arguments])
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "run/model") in result.output.replace("\n", "")
    load(tmp_path / "run/model")
    assert re.search(r"^step 2 of 2  loss \d+\.\d{4}  validation_loss \d+\.\d{4}  ", result.output, re.MULTILINE)
    adapter = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())
    assert (adapter["r"], adapter["base_model_name_or_path"]) == (8, "builtin")
