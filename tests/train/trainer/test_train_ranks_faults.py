"""`strata train` over ranks that are killed or stopped goes on and ends as if nothing had been; training teaches.

Short by default; STRATA_FULL_FAULTS=1 also kills a long run at moments that may lie in starting and resuming.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from examples import toy_data
from strata import LLM
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import BUILTIN_FOLDER
from strata.train.config import read_train_config
from strata.train.data.tokenize import tokenize
from strata.train.finish import save_model
from strata.train.tasks.mixture import TASKS, held_out_examples
from strata.train.trainer import Trainer
from tests.train.conftest import log
from tests.train.tiny_run import Files, Table, last_checkpoint, log_of, repeatable, write_files, write_toml
from tests.train.train_ranks import ALONE, Command, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")

FULL = bool(os.environ.get("STRATA_FULL_FAULTS"))
STEPS = 60
# Which ranks are killed, one time after the other.
KILLED = (1,), (0, 1), (0,)
LAYOUT = {"shard": 2, "zero": 2}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


def run_through(folder: Path, table: Table) -> Path:
    """The folder of the run on two ranks if nothing happens to it."""
    steps, out = table["run"]["steps"], folder / "through"
    toml = write_toml(folder / "through.toml", table | {"run": table["run"] | {"out": str(out)}})
    with Command(toml, "--ranks", 2) as command:
        code, said = command.end()
    assert code == 0, said
    shown = re.findall(r"^step (\d+) of \d+.*  loss \d+\.\d{4}  .*tokens_per_second [\d,]+$", said, re.MULTILINE)
    assert shown == [str(step) for step in range(1, steps + 1)]
    return out


def assert_same(folder: Path, through: Path) -> None:
    """Every step is in the log once, with the same numbers; masters, moments and position have the same bits."""
    log, wanted = log_of(folder), log_of(through)
    assert [line["step"] for line in log] == list(range(1, len(wanted) + 1))
    assert repeatable(log) == repeatable(wanted)
    assert last_checkpoint(folder) == last_checkpoint(through)
    assert (folder / "model/model.safetensors").read_bytes() == (through / "model/model.safetensors").read_bytes()


def has_reached(folder: Path, step: int) -> bool:
    log = log_of(folder)
    return bool(log) and log[-1]["step"] >= step


def first_step_after(command: Command, folder: Path, begun: int) -> float:
    """When the log has a new step, after the file `begun` was replaced by what resuming keeps of it."""
    log = folder / "log.jsonl"
    command.until(lambda: log.stat().st_ino != begun)
    kept = log.stat().st_size
    command.until(lambda: log.stat().st_size > kept)
    return time.monotonic()


@pytest.mark.long
def test_killed_three_times_in_a_row_and_stopped_once(files: Files, tmp_path: Path) -> None:
    """The rank that is stopped is named; both start again."""
    chance = random.Random(7)
    out = tmp_path / "run"
    table = files.table(out, run={"steps": STEPS}, parallel=LAYOUT, faults={"hang_seconds": 5})
    pauses = []
    with Command(write_toml(tmp_path / "run.toml", table), "--ranks", 2, "--restarts", 9) as command:
        for number, victims in enumerate(KILLED):
            at = chance.randint(9 * number + 1, 9 * number + 6)
            command.until(lambda at=at: has_reached(out, at))
            time.sleep(chance.uniform(0.0, 0.1))
            begun = (out / "log.jsonl").stat().st_ino
            command.signal(*victims)
            killed = time.monotonic()
            pauses.append(first_step_after(command, out, begun) - killed)
        command.until(lambda: has_reached(out, STEPS - 30))
        command.signal(1, number=signal.SIGSTOP)
        code, said = command.end()
    print(f"seconds from a kill to the first new step: {', '.join(f'{pause:.1f}' for pause in pauses)}")
    assert code == 0, said
    assert said.count("was killed by SIGKILL; restart ") == len(KILLED)
    assert re.search(r"strata: no progress for 5 s: rank 1 .*; rank 0 waits in \w+ \d+ of '[a-z*]+'", said), said
    assert "strata: rank 0 failed with exit code 75; restart " in said
    assert "Traceback" not in said
    assert max(pauses) < 180
    assert_same(out, run_through(tmp_path, table))


@pytest.mark.skipif(not FULL, reason="takes minutes; STRATA_FULL_FAULTS=1 runs it")
def test_killed_again_and_again_at_any_moment(files: Files, tmp_path: Path) -> None:
    steps, most = 300, 60
    chance = random.Random(11)
    out = tmp_path / "run"
    table = files.table(out, run={"steps": steps, "checkpoint_every": 10}, parallel=LAYOUT)
    kills = 0
    with Command(write_toml(tmp_path / "run.toml", table), "--ranks", 2, "--restarts", most) as command:
        while kills < most and not has_reached(out, steps - 60):
            time.sleep(chance.uniform(0.0, 8.0))
            command.until(lambda: len(command.ranks()) == 2)
            command.signal(*chance.choice([(0,), (1,), (0, 1)]))
            kills += 1
        code, said = command.end()
    print(f"killed {kills} times")
    assert code == 0, said
    assert_same(out, run_through(tmp_path, table))


def test_one_process_killed_and_resumed_by_hand(files: Files, tmp_path: Path) -> None:
    out = tmp_path / "run"
    toml = write_toml(tmp_path / "run.toml", files.table(out, run={"steps": 60}))
    with Command(toml) as command:
        command.until(lambda: has_reached(out, 8))
    last = log_of(out)[-1]["step"]
    assert last < 60
    with Command(toml, "--resume") as command:
        code, said = command.end()
    assert code == 0, said
    uninterrupted = train(ALONE, files.table(tmp_path / "through", run={"steps": 60}))
    assert repeatable(log_of(out)) == repeatable(uninterrupted["lines"])
    assert last_checkpoint(out) == last_checkpoint(tmp_path / "through")


EXAMPLES = Path(__file__).parents[3] / "examples"


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
