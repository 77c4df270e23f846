"""Whole runs in one process on the CPU: resuming, what they leave, what they refuse before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strata import LLM
from strata.engine.sampling_params import SamplingParams
from strata.models.folder import BUILTIN_FOLDER
from strata.models.save import save
from strata.models.weights import load
from strata.train import trainer
from strata.train.adapters.lora import LoraConfig
from strata.train.checkpoints.folder import checkpoints
from strata.train.data.loader import Position
from strata.train.finish import save_model
from strata.train.stepper import make_stepper
from strata.train.steps import make
from strata.train.tasks.exercises import write_exercises
from strata.train.trainer import Trainer
from tests.train.conftest import FRESH, Small, Tune, cut_off, log
from tests.train.samples import ALONE, SHARE


def assert_same_end(one: Path, other: Path, checkpoint: str) -> dict[str, torch.Tensor]:
    """Two runs have the same log and, to the bit, the same masters and optimizer state, which are returned."""
    assert log(one) == log(other)
    first, second = (load_file(folder / "checkpoints" / checkpoint / SHARE) for folder in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


def test_resumed_pretraining_repeats_every_bit(small: Small, tmp_path: Path) -> None:
    through = Trainer(small(run={"out": str(tmp_path / "through")}), ALONE)
    assert through.train() == through.position
    cut = small(run={"out": str(tmp_path / "cut")})
    cut_off(Trainer(cut, ALONE), 4)
    assert [line["step"] for line in log(tmp_path / "cut")] == [1, 2, 3, 4]
    resumed = Trainer(cut, ALONE, resume=True)
    assert resumed.position.step == 3
    assert resumed.train() == through.position
    assert [line["step"] for line in log(tmp_path / "cut")] == [1, 2, 3, 4, 5, 6]
    state = assert_same_end(tmp_path / "cut", tmp_path / "through", "step-00000006")
    assert {name.split("/")[0] for name in state} == {"master", "exp_avg", "exp_avg_sq"}
    assert not torch.are_deterministic_algorithms_enabled()


def test_checkpoints_lie_between_lines_of_the_log(small: Small, tmp_path: Path) -> None:
    """Each adds a line, so that no line spans the point where a run may resume."""
    intervals = {"steps": 7, "log_every": 3, "checkpoint_every": 2}
    Trainer(small(run=intervals | {"out": str(tmp_path / "through")}), ALONE).train()
    assert [line["step"] for line in log(tmp_path / "through")] == [2, 3, 4, 6, 7]
    cut = small(run=intervals | {"out": str(tmp_path / "cut")})
    cut_off(Trainer(cut, ALONE), 6)
    resumed = Trainer(cut, ALONE, resume=True)
    assert resumed.position.step == 4
    resumed.train()
    assert_same_end(tmp_path / "cut", tmp_path / "through", "step-00000007")


@pytest.mark.parametrize(
    ("source", "sections"),
    [
        ("style", {"lora": {"rank": 2, "quantization": "int4"}}),
        ("style", {}),
        ("short", {"dpo": {}}),
        ("short", {"dpo": {}, "lora": {"rank": 2}}),
    ],
)
def test_resumed_fine_tuning_repeats_every_bit(
    tune: Tune, tmp_path: Path, source: str, sections: dict[str, Any]
) -> None:
    Trainer(tune(source, run={"out": str(tmp_path / "through")}, **sections), ALONE).train()
    cut = tune(source, run={"out": str(tmp_path / "cut")}, **sections)
    cut_off(Trainer(cut, ALONE), 3)
    resumed = Trainer(cut, ALONE, resume=True)
    assert resumed.position.step == 2
    resumed.train()
    state = assert_same_end(tmp_path / "cut", tmp_path / "through", "step-00000004")
    if "lora" in sections:
        assert all(".lora_" in name for name in state)
    changed = tune(source, run={"out": str(tmp_path / "cut"), "seed": 9}, **sections)
    with pytest.raises(ValueError, match=r"run\.seed was 0 and is now 9"):
        Trainer(changed, ALONE, resume=True)
    with pytest.raises(ValueError, match="holds a run"):
        Trainer(cut, ALONE)


def test_a_run_leaves_checkpoints_and_a_model_that_serves(small: Small, tmp_path: Path) -> None:
    run = Trainer(small(), ALONE)
    run.train()
    kept = checkpoints(tmp_path / "run/checkpoints")
    assert [path.name for path in kept] == ["step-00000003", "step-00000006"]
    folder = save_model(run)
    model, config = load(folder)
    assert config.dtype == torch.bfloat16
    masters = load_file(kept[-1] / SHARE)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.flatten(), masters[f"master/{name}"].to(torch.bfloat16)), name
    (output,) = LLM(folder, device="cpu").generate("What is 2 + 2?", SamplingParams(max_tokens=5))
    assert output.outputs[0].token_ids
    # Nothing that is run when it is read.
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "lock"]
    assert {path.suffix for path in written} <= {".safetensors", ".json", ".jsonl", ".jinja"}


def test_a_tuned_model_keeps_its_dtype_and_what_its_folder_says(tune: Tune, tmp_path: Path) -> None:
    run = Trainer(tune("style", run={"steps": 2}), ALONE)
    run.train()
    model, config = load(save_model(run))
    base, base_config = load(run.start.tokenizer)
    assert config == base_config
    for (name, ours), before in zip(model.named_parameters(), base.parameters(), strict=True):
        assert ours.dtype == before.dtype
        # Norms change by less than what bfloat16 tells apart.
        assert ours.dim() < 2 or not torch.equal(ours, before), name


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_adapters_are_merged_into_the_weights_as_they_are_stored(
    tune: Tune, tmp_path: Path, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into those that a GPU computes with, which are rounded to bfloat16."""
    monkeypatch.setattr(make, "compute_dtype_on", lambda *_: torch.bfloat16)
    base, config = load(BUILTIN_FOLDER, dtype=torch.float32)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter += 1e-3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0))
    save(base.to(stored), config, tmp_path / "base", BUILTIN_FOLDER)
    lora = {"rank": 2, "projections": ["q_proj"]}
    run = Trainer(tune("style", run={"steps": 2}, start={"model": str(tmp_path / "base")}, lora=lora), ALONE)
    run.train()
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "base", save_model(run)))
    adapter = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert weight.dtype == stored
        if "q_proj" not in name:
            assert torch.equal(weight, before[name]), name
            continue
        a, b = (adapter[f"base_model.model.{name.replace('weight', f'lora_{one}.weight')}"].double() for one in "AB")
        exact = before[name].double() + LoraConfig().alpha / 2 * b @ a
        assert not torch.equal(weight, before[name]), name
        # Rounded once: by half of the distance between neighbours, and a little for sums in float32 and for subnormals.
        allowed = 0.501 * torch.finfo(stored).eps * exact.abs() + 5e-8
        assert ((weight.double() - exact).abs() <= allowed).all(), name


def test_pretraining_from_text_learns_it(tune: Tune, tmp_path: Path) -> None:
    run = Trainer(tune("text", run={"steps": 25}, **FRESH), ALONE)
    run.train()
    losses = [line["loss"] for line in log(tmp_path / "run")]
    assert losses[0] == pytest.approx(8.3, abs=0.2)  # the logarithm of 4096
    assert losses[-1] < 4
    assert load(save_model(run))[1].vocab_size == 4096
    assert len(checkpoints(tmp_path / "run/checkpoints")) == 2


def test_a_vocabulary_may_have_spare_rows(small: Small, tmp_path: Path) -> None:
    run = Trainer(small(model={"vocab_size": 640}), ALONE)
    run.train()
    folder = save_model(run)
    model, config = load(folder)
    assert config.vocab_size == 640
    assert model.model.embed_tokens.weight.shape == (640, 32)
    outputs = LLM(folder, device="cpu").generate(["one", "two"], SamplingParams(temperature=1.0, max_tokens=20))
    assert all(output.outputs[0].token_ids for output in outputs)
    with pytest.raises(ValueError, match=r"model\.vocab_size = 599 is less than the tokenizer's 600; remove it"):
        Trainer(small(model={"vocab_size": 599}, run={"out": str(tmp_path / "other")}), ALONE)


def test_a_run_is_not_overwritten_nor_resumed_with_another_recipe(small: Small, exercises: Path) -> None:
    Trainer(small(), ALONE).train()
    with pytest.raises(
        ValueError, match=r"holds a run \(step-00000006\); go on with --resume, or choose another folder"
    ):
        Trainer(small(), ALONE)
    for changes, message in (
        ({"optimizer": {"learning_rate": 1e-3}}, r"optimizer\.learning_rate was 0\.005 and is now 0\.001"),
        ({"run": {"precision": "bf16", "seed": 4}}, r"run\.seed was 3 and is now 4"),
        ({"data": {"tokens_per_pack": 700}}, r"data\.tokens_per_pack was 600 and is now 700"),
        ({"model": {"rope_theta": 5e5}}, r"model\.rope_theta was None and is now 500000\.0"),
        ({"data": {"sources": [{"folder": str(exercises), "weight": 2}]}}, r"data\.sources was \[{'weight': 1\.0}\]"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(small(**changes), ALONE, resume=True)


def test_what_decides_no_numbers_may_change_when_a_run_is_resumed(
    small: Small, exercises: Path, tmp_path: Path
) -> None:
    Trainer(small(), ALONE).train()
    moved = tmp_path / "moved"
    moved.symlink_to(exercises)
    longer = small(
        run={"steps": 8, "log_every": 2, "checkpoint_every": 4},
        schedule={"decay": 0},
        data={"sources": [{"folder": str(moved)}]},
        faults={"spike": "ignore"},
    )
    run = Trainer(longer, ALONE, resume=True)
    run.train()
    assert run.position.step == 8
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 8]


def test_other_data_is_noticed(small: Small, tokenizer_folder: Path, tmp_path: Path) -> None:
    write_exercises(tmp_path / "other", 300, tokenizer_folder=tokenizer_folder, seed=4)
    Trainer(small(), ALONE).train()
    with pytest.raises(ValueError, match=r"fingerprints\.0 was '\w+' and is now '\w+'"):
        Trainer(small(data={"sources": [{"folder": str(tmp_path / "other")}]}), ALONE, resume=True)


def test_resuming_where_nothing_is_begins(small: Small) -> None:
    said: list[str] = []
    run = Trainer(small(run={"steps": 3}, schedule={"decay": 0}), ALONE, resume=True, warn=said.append)
    assert said == [f"nothing to resume in {run.folder}: begins at step 1"]
    assert run.train().step == 3
    Trainer(run.config, ALONE, resume=True, warn=said.append)
    assert len(said) == 1


def test_same_seed_same_run_other_seed_another(small: Small, tmp_path: Path) -> None:
    losses = []
    for number, seed in enumerate((3, 3, 4)):
        out = tmp_path / str(number)
        Trainer(small(run={"out": str(out), "seed": seed, "steps": 4}), ALONE).train()
        losses.append([line["loss"] for line in log(out)])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_computed_before_the_first_step_is_deterministic_if_steps_are(
    small: Small, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference of DPO, for one."""
    seen = []

    def noted(*args: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return make_stepper(*args)

    monkeypatch.setattr(trainer, "make_stepper", noted)
    Trainer(small(run={"deterministic": wanted}), ALONE)
    assert seen == [wanted]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_line_of_the_log_sums_up_its_interval(small: Small, tmp_path: Path) -> None:
    every = [{"log_every": 1}, {"log_every": 3}]
    lines = []
    for number, run in enumerate(every):
        out = tmp_path / str(number)
        position = Trainer(small(run={"out": str(out), **run}), ALONE).train()
        lines.append(log(out))
    single, wide = lines
    assert [line["step"] for line in wide] == [3, 6]
    for line, parts in zip(wide, (single[:3], single[3:]), strict=True):
        for name in ("loss", "counted"):
            assert line[name] == pytest.approx(sum(one[name] for one in parts) / 3), name
        assert line["gradient_norm"] == parts[-1]["gradient_norm"]
        assert line["tokens"] == parts[-1]["tokens"]
        assert line["utilisation"] == pytest.approx(sum(one["utilisation"] for one in parts) / 3, abs=1e-4)
    assert [line["learning_rate"] for line in single] == pytest.approx([2.5e-3, 5e-3, 5e-3, 5e-3, 5e-3, 2.5e-3])
    assert single[-1]["tokens"] == position.tokens <= 6 * 1200


@pytest.mark.parametrize(
    ("source", "sections", "message"),
    [
        ("short", {}, r"the data holds preferences: add a \[dpo\] table"),
        ("style", {"dpo": {}}, "holds data of the kind 'chat'; this run needs 'preference'"),
        ("style", {"data": {"tokens_per_pack": 20}}, r"but a pack has room for 20; raise data\.tokens_per_pack"),
        ("style", {"data": {"sources": [{"folder": "nothing"}]}}, "nothing"),
        (
            "style",
            {"start": {"model": "nowhere"}},
            r"start\.model 'nowhere' does not exist; give a model folder, org/model of the Hugging Face cache, or",
        ),
        ("style", {"parallel": {"dp": 2}}, r"= 2 ranks, but 1 run; change one of them or the ranks"),
        ("style", {"parallel": {"micro_batches": 2}}, r"micro_batches follows from data\.packs_per_step; remove it"),
        ("style", {"parallel": {"zero": 1}}, "zero = 1 has one rank to divide among"),
        ("style", {"parallel": {"sequence_parallel": True}}, "sequence_parallel divides tokens over tp, and tp = 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tune: Tune, tmp_path: Path, source: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(tune(source, **sections), ALONE)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hiden_size": 3}, "hiden_size"),
        ({"eos_token_id": 3}, r"model\.eos_token_id follows from the tokenizer; remove it"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"max_position_embeddings": 64}, r"a document of \d+ tokens, but the model reads at most 64"),
    ],
)
def test_the_model_section_is_read_strictly(small: Small, model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(small(model=model), ALONE)


def test_eight_bits_need_a_gpu(small: Small) -> None:
    with pytest.raises(ValueError, match=r"'fp8-row' needs a GPU .* use 'bf16' on this cpu"):
        Trainer(small(run={"precision": "fp8-row"}), ALONE)


def test_a_run_that_is_done_stays_as_it_is(small: Small, tmp_path: Path) -> None:
    Trainer(small(), ALONE).train()
    before = log(tmp_path / "run")
    done = Trainer(small(), ALONE, resume=True)
    lines: list[dict[str, Any]] = []
    assert isinstance(done.train(lines.append), Position)
    assert lines == []
    assert log(tmp_path / "run") == before
