"""Whole runs of models with experts: they learn, are resumed on other layouts, and leave a model that loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from strata.cli.train import train as command
from strata.files.toml_tables import read_table
from strata.models.weights import load
from strata.train.config import TrainConfig
from strata.train.finish import save_model
from strata.train.trainer import Trainer
from tests.parallel.ranks import run_ranks
from tests.train.conftest import cut_off, log
from tests.train.tiny_run import EXPERTS, LLAMA, Files, Table, write_files, write_toml
from tests.train.train_ranks import ALONE, train_each

MIXTRAL: Table = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
FAMILIES = {"mixtral": MIXTRAL, "qwen3-moe": EXPERTS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_trains_and_leaves_a_model_that_loads(family: str, files: Files, tmp_path: Path) -> None:
    run = {"steps": 12, "checkpoint_every": 12}
    model = {"router_aux_loss_coef": 0.02, **FAMILIES[family]}
    table = files.table(tmp_path / "run", run=run, optimizer={"learning_rate": 1e-2}) | {"model": model}
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(write_toml(tmp_path / "run.toml", table))])
    assert result.exit_code == 0, result.output
    lines = log(tmp_path / "run")
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    for line in lines:
        assert 0.25 < line["busiest_expert"] <= 0.5
        # Two experts of a token; more only where busy experts are also likely ones.
        assert 1.9 < line["balance_loss"] < 3
    ours, config = load(tmp_path / "run/model")
    stored = load_file(tmp_path / "run/checkpoints/step-00000012/rank-00000.safetensors")
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.flatten(), stored[f"master/{name}"].to(config.dtype or torch.float32)), name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model", dtype=torch.float32)
    assert theirs.config.router_aux_loss_coef == 0.02
    tokens = torch.tensor([[5, 9, 3, 7]])
    loss = theirs(tokens, labels=tokens, output_router_logits=True)
    assert loss.loss.isfinite()
    assert loss.aux_loss.isfinite()


@pytest.mark.parametrize("balance", [{}, {"method": "bias", "rate": 0.01}])
def test_a_resumed_run_repeats_every_bit(balance: Table, files: Files, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"run": {"steps": 6}, "model": EXPERTS}
    through, cut = (
        read_table(TrainConfig, files.table(tmp_path / name, **sections, balance=balance))
        for name in ("through", "cut")
    )
    Trainer(through, ALONE).train()
    cut_off(Trainer(cut, ALONE), 4)
    Trainer(cut, ALONE, resume=True).train()
    assert log(tmp_path / "cut") == log(tmp_path / "through")
    one, other = (
        load_file(tmp_path / name / "checkpoints/step-00000006/rank-00000.safetensors") for name in ("cut", "through")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    kind = "selection_bias" if balance else "expert_fractions"
    assert {name for name in one if not name.startswith(("master", "exp_avg"))} == {
        f"{kind}/model.layers.{layer}.mlp.gate" for layer in range(2)
    }
    other_way = read_table(TrainConfig, files.table(tmp_path / "cut", **sections, balance=balance | {"method": "none"}))
    with pytest.raises(ValueError, match=r"balance\.method was .* and is now 'none'"):
        Trainer(other_way, ALONE, resume=True)


def test_the_bias_goes_on_in_another_layout(files: Files, tmp_path: Path) -> None:
    """Two steps each on two replicas, one process, two stages; against one process throughout."""
    layouts: list[Table | None] = [{"dp": 2}, None, {"pp": 2}]
    sections = {"model": EXPERTS, "balance": {"method": "bias", "rate": 0.01}}
    runs: dict[str, Table] = {}
    for number, layout in enumerate(layouts):
        run = {"steps": 2 * (number + 1), "checkpoint_every": 2}
        table = files.table(tmp_path / "run", run=run, **sections, **{} if layout is None else {"parallel": layout})
        runs[str(number)] = {"table": table, "alone": layout is None, "resume": number > 0}
    through = files.table(tmp_path / "through", run={"steps": 6, "checkpoint_every": 2}, **sections)
    runs["through"] = {"table": through, "alone": True}
    found = run_ranks(train_each, 2, tmp_path, runs=runs)[0]
    lines = [line for number in range(3) for line in found[str(number)]["lines"]]
    wanted = found["through"]["lines"]
    assert [line["step"] for line in lines] == [line["step"] for line in wanted] == [1, 2, 3, 4, 5, 6]
    for line, other in zip(lines, wanted, strict=True):
        for name in ("loss", "balance_loss", "busiest_expert"):
            assert line[name] == pytest.approx(other[name], rel=1e-5), (line["step"], name)
    assert all("without the bias" in found[name]["said"][0] for name in found)


def test_people_are_told_that_the_bias_does_not_travel(files: Files, tmp_path: Path) -> None:
    said: list[str] = []
    table = files.table(tmp_path / "run", model=EXPERTS, balance={"method": "bias"})
    run = Trainer(read_table(TrainConfig, table), ALONE, warn=said.append)
    run.train()
    save_model(run)
    assert [line for line in said if "will route tokens without the bias" in line] == [said[0]] * 2


@pytest.mark.parametrize(
    ("balance", "message"),
    [
        ({"method": "loss"}, r"\[balance\] keeps experts equally busy, and LlamaForCausalLM has none; remove"),
        ({"method": "magic"}, r"balance\.method = 'magic' must be one of loss, bias, none"),
        ({"method": "bias", "rate": 0.0}, r"balance\.rate = 0\.0 must be positive"),
    ],
)
def test_wrong_tables_are_refused(balance: Table, message: str, files: Files, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(read_table(TrainConfig, files.table(tmp_path / "run", balance=balance)), ALONE)


def test_tuning_leaves_routers_alone(files: Files, tmp_path: Path) -> None:
    table = files.tuning(tmp_path / "run", lora={"rank": 2}, balance={"method": "none"})
    with pytest.raises(ValueError, match=r"\[lora\] and \[dpo\] leave experts"):
        read_table(TrainConfig, table)
