"""Whole runs of models with experts or recurrent layers, and the recipes of examples/: they learn and are resumed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from strata.cli.train import train as command
from strata.cli.train_estimate import estimate_text
from strata.files.toml_tables import read_table
from strata.models.balance import routers
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.save import save
from strata.models.weights import load
from strata.text.tokenizer import Tokenizer
from strata.train.config import TrainConfig, read_train_config
from strata.train.finish import save_model
from strata.train.start import fresh_config
from strata.train.trainer import Trainer
from tests.models.batches import packed
from tests.models.recurrent_checkpoints import RECURRENT_CONFIGS
from tests.parallel.ranks import run_ranks
from tests.train.conftest import cut_off, log
from tests.train.tiny_run import EXPERTS, LLAMA, Files, Table, log_of, write_files, write_toml
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


V3: Table = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "tie_word_embeddings": False,
}
NAME = "model.layers.1.mlp.gate.e_score_correction_bias"
RATE = 0.0078125  # a power of two, so that what a bias has moved is a whole number of it


@pytest.fixture(scope="module")
def start(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of DeepSeek-V3 in bfloat16 whose biases are float32, as they are published."""
    with Tokenizer.load(files.tokenizer) as tokenizer:
        config = fresh_config({key: value for key, value in V3.items() if value is not None}, tokenizer)
    model = build(config)
    initialize(model, seed=5)
    model.get_parameter(NAME).copy_(torch.tensor([0.5, -0.25, 0.125, 0.0]) + 2**-15)
    folder = tmp_path_factory.mktemp("start") / "model"
    save(model.to(torch.bfloat16), config, folder, files.tokenizer)
    return folder


def config_of(files: Files, start: Path, out: Path, **sections: Any) -> TrainConfig:
    table = files.tuning(out, **{"start": {"tokenizer": None, "model": str(start)}} | sections)
    return read_table(TrainConfig, table)


def bias_of(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")[NAME]


def test_biases_move_by_counts_and_stand_in_the_model(files: Files, start: Path, tmp_path: Path) -> None:
    said: list[str] = []
    balance = {"method": "bias", "rate": RATE}
    through, cut = (config_of(files, start, tmp_path / name, balance=balance) for name in ("through", "cut"))
    run = Trainer(through, ALONE, warn=said.append)
    run.train()
    cut_off(Trainer(cut, ALONE), 2)
    Trainer(cut, ALONE, resume=True).train()
    assert log(tmp_path / "cut") == log(tmp_path / "through")
    assert not said
    assert "balance_loss" not in log(tmp_path / "through")[0]
    folder = save_model(run)
    before, after = bias_of(start), bias_of(folder)
    moved = (after - before) / RATE
    assert moved.abs().max() > 0
    assert torch.equal(moved, moved.round().clamp(-3, 3))
    stored = load_file(tmp_path / "through/checkpoints/step-00000003/rank-00000.safetensors")
    assert torch.equal(stored["selection_bias/model.layers.1.mlp.gate"], after)
    assert not any(name.endswith("e_score_correction_bias") for name in stored)
    names = {one["torch_dtype"] for one in (json.loads((at / "config.json").read_text()) for at in (start, folder))}
    assert names == {"bfloat16"}
    ours, _ = load(folder, dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = [5, 9, 3, 7, 11]
    with torch.no_grad():
        error = ours.head(ours(packed([tokens]))) - theirs(torch.tensor([tokens])).logits[0]
    assert error.abs().max() < 2e-5


@pytest.mark.parametrize("tuned", [{"dpo": {}}, {"lora": {"rank": 2}}])
def test_tuning_leaves_biases_as_they_are(tuned: Table, files: Files, start: Path, tmp_path: Path) -> None:
    data = {"sources": [{"folder": str(files.pairs)}]} if "dpo" in tuned else {}
    config = config_of(files, start, tmp_path / "run", data=data, run={"steps": 1, "checkpoint_every": 1}, **tuned)
    run = Trainer(config, ALONE)
    run.train()
    folder = save_model(run)
    assert torch.equal(bias_of(folder), bias_of(start))
    changed, was = (load_file(one / "model.safetensors") for one in (folder, start))
    assert any(not torch.equal(changed[name], was[name]) for name in was)


def test_the_balancing_loss_is_refused(files: Files, start: Path, tmp_path: Path) -> None:
    config = config_of(files, start, tmp_path / "run", balance={"method": "loss"})
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM scores each expert by itself; use 'bias'"):
        Trainer(config, ALONE)


def test_a_bias_is_no_parameter_of_a_model_in_training(start: Path) -> None:
    model, _ = load(start)
    (router,) = routers(model).values()
    router.hold_bias()
    assert NAME not in dict(model.named_parameters())
    assert torch.equal(router.selection_bias, bias_of(start))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mamba2", "granite-hybrid-experts", "qwen3-next"])
def test_losses_of_recurrent_layers_fall(name: str, files: Files, tmp_path: Path) -> None:
    table = files.table(tmp_path / "out", run={"steps": 8, "checkpoint_every": 8})
    table["model"] = {key: value for key, value in RECURRENT_CONFIGS[name].items() if key != "vocab_size"}
    Trainer(read_train_config(write_toml(tmp_path / "run.toml", table)), ALONE).train()
    losses = [line["loss"] for line in log_of(tmp_path / "out")]
    assert losses[-1] < losses[0] - 0.2
    assert losses == sorted(losses, reverse=True)


EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(("name", "billions", "head_dim"), [("1b", 1.498, 64), ("8b", 8.030, 128)])
def test_the_large_shapes(name: str, billions: float, head_dim: int) -> None:
    """Llama 3's, whose vocabulary has 128,256 tokens; two sequences of the longest kind fill a pack."""
    recipe = tomllib.loads((EXAMPLES / f"{name}.toml").read_text())
    config = config_from_dict(recipe["model"], "model")
    with torch.device("meta"):
        model = build(config)
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert config.head_dim == head_dim
    assert recipe["data"]["tokens_per_pack"] == 2 * config.max_length
    ranks = recipe.get("parallel", {}).get("shard", 1)
    assert recipe["data"]["packs_per_step"] == ranks


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_estimate_needs_no_file_but_the_recipe(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = read_train_config(path)
    lines = estimate_text(run, "h200", run.parallel.ranks if run.parallel else 1).splitlines()
    assert sum(line.startswith("* recompute") for line in lines) == 1


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_commands_of_a_recipe_are_as_the_command_line_has_them(path: Path) -> None:
    commands = [line[1:].split() for line in path.read_text().splitlines() if line.startswith("#     strata")]
    assert ["strata", "train", f"examples/{path.name}"] in [words[:3] for words in commands]
    assert all(words[2] == "--model" for words in commands if words[1] == "chat")
