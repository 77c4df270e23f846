"""Runs that are validated: by the loss of a plain loop, without a change to what is trained, stopped at the right step,
resumed, and finished with the best weights; and runs whose length is in epochs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strata.models.families import build
from strata.models.layers import CausalLM
from strata.models.weights import load
from strata.train.checkpoints.folder import checkpoints
from strata.train.data.encoding import Document, Encoded
from strata.train.data.loader import OnceLoader
from strata.train.data.mixture import DatasetReader
from strata.train.data.pack import PackedBatch, pack
from strata.train.data.shards import TokenDataset
from strata.train.finish import save_model
from strata.train.phases import NO_PHASES
from strata.train.tasks.exercises import write_exercises
from strata.train.trainer import Trainer
from strata.train.validation import Validation
from tests.train.conftest import Small, Tune, cut_off, log
from tests.train.samples import ALONE, SHARE, sample


@pytest.fixture(scope="module")
def apart(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exercises that no run trains on."""
    folder = tmp_path_factory.mktemp("apart")
    write_exercises(folder, 40, tokenizer_folder=tokenizer_folder, seed=4)
    return folder


def masters(checkpoint: Path) -> dict[str, Tensor]:
    found = load_file(checkpoint / SHARE)
    return {name.removeprefix("master/"): one for name, one in found.items() if name.startswith("master/")}


def model_of(run: Trainer) -> CausalLM:
    """The model of a run's newest checkpoint, in float32."""
    model = build(run.start.config)
    values = masters(checkpoints(run.folder / "checkpoints")[-1])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(values[name].view(weight.shape))
    return model


@torch.no_grad()
def plain_losses(model: CausalLM, document: Document) -> Tensor:
    """Of the tokens that count in a document that is read alone."""
    offsets = np.array([0, len(document.tokens)])
    batch, _, _ = pack(Encoded(document.tokens, document.loss_mask, offsets)).to(torch.device("cpu"))
    each = -model.head(model(batch)).double().log_softmax(-1)[:-1]
    wanted = torch.from_numpy(document.tokens[1:].astype(np.int64))
    return each.gather(1, wanted[:, None])[:, 0][torch.from_numpy(document.loss_mask[1:])]


def trained(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without what validation adds."""
    return [{name: one for name, one in line.items() if not name.startswith("validation_")} for line in lines]


def test_validation_is_a_plain_loop_and_changes_nothing(small: Small, apart: Path, tmp_path: Path) -> None:
    plain = Trainer(small(run={"out": str(tmp_path / "plain")}), ALONE)
    plain.train()
    run = Trainer(small(validation={"folder": str(apart), "every": 2}), ALONE)
    run.train()
    lines = log(tmp_path / "run")
    assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
    assert trained(lines) == log(tmp_path / "plain")
    ends = [checkpoints(tmp_path / name / "checkpoints")[-1] for name in ("plain", "run")]
    first, second = (load_file(end / SHARE) for end in ends)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

    dataset, model = TokenDataset(apart), model_of(run)
    each = torch.cat([plain_losses(model, sample(dataset, number)[0]) for number in range(dataset.samples)])
    assert lines[-1]["validation_loss"] == pytest.approx(each.mean().item(), rel=1e-6)
    for capacity, packs, window in ((500, 1, 7), (1000, 3, 1000)):
        assert run.config.validation is not None
        loader = OnceLoader(DatasetReader([dataset]), [0], capacity, packs, window)
        found = Validation(run.config.validation, loader, NO_PHASES).measure(run.stepper, 1)
        assert found["validation_loss"] == pytest.approx(lines[-1]["validation_loss"], rel=1e-6)


def test_preferences_are_validated_by_their_loss_and_how_many_are_right(tune: Tune) -> None:
    run = Trainer(tune("short", dpo={"beta": 0.2}, validation={"share": 0.2, "every": 4}), ALONE)
    run.train()
    line = log(run.folder)[-1]
    model, (base, _) = model_of(run), load(run.start.tokenizer, dtype=torch.float32)
    held_out = TokenDataset(run.config.data.sources[0].folder).divided(0.2)[1]
    margins = []
    for number in range(held_out.samples):
        chosen, rejected = (
            plain_losses(base, one).sum() - plain_losses(model, one).sum() for one in sample(held_out, number)
        )
        margins.append(0.2 * (chosen - rejected))
    found = torch.stack(margins)
    assert line["validation_loss"] == pytest.approx(torch.nn.functional.softplus(-found).mean().item(), rel=1e-5)
    assert line["validation_preferred"] == pytest.approx((found > 0).double().mean().item())
    assert line["validation_margin"] == pytest.approx(found.mean().item(), rel=1e-3)


def test_what_is_held_out_is_never_trained_on(small: Small, exercises: Path) -> None:
    run = Trainer(small(run={"steps": 12}, validation={"share": 0.1}), ALONE)
    held_out = {
        one.tobytes()
        for number in range(30)
        for one in [sample(TokenDataset(exercises).divided(0.1)[1], number)[0].tokens]
    }
    seen: set[bytes] = set()
    place = run.position.place
    for _ in range(12):
        step = run.loader.step(place)
        for packed in step.batches:
            documents = np.split(packed.tokens, packed.offsets[1:-1])
            seen |= {one.astype(np.uint16).tobytes() for one in documents}
        place = step.next
    assert len(seen) > 100
    assert not seen & held_out


def scripted(run: Trainer, *losses: float) -> Trainer:
    """The run, whose validation finds these losses, one after another."""
    left, now, sync = [*losses], [0.0], run.stepper.sync_weights

    def sync_weights() -> None:
        sync()
        now[0] = left.pop(0)

    def measured(batches: Sequence[PackedBatch]) -> dict[str, Tensor]:
        return {"loss": torch.tensor(now[0]), "counted": torch.tensor(1.0)}

    run.stepper.sync_weights = sync_weights  # type: ignore[method-assign]
    run.stepper.measured = measured  # type: ignore[method-assign]
    return run


PATIENT = {"share": 0.1, "every": 1, "patience": 2}


def test_a_run_stops_when_patience_is_used_up_and_gives_its_best_model(small: Small, tmp_path: Path) -> None:
    """Of which the checkpoint remains, though newer ones replace others."""
    said: list[str] = []
    settings = {"run": {"checkpoint_every": 1, "keep_checkpoints": 1, "steps": 9}, "validation": PATIENT}
    run = scripted(Trainer(small(**settings), ALONE, warn=said.append), 3.0, 2.0, 2.5, 2.25)
    assert run.train().step == 2
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4]
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step-00000002", "step-00000004"]
    assert any("early stopping: no validation loss below 2.0000" in line for line in said)
    best = masters(tmp_path / "run/checkpoints/step-00000002")
    for name, weight in load(save_model(run))[0].named_parameters():
        assert torch.equal(weight.flatten(), best[name].to(weight.dtype)), name

    over = Trainer(small(**settings), ALONE, resume=True)
    assert over.position.step == 4
    assert over.is_over
    assert over.train().step == 2
    longer = copy.deepcopy(settings) | {"validation": PATIENT | {"patience": 3}}
    further = scripted(Trainer(small(**longer), ALONE, resume=True), 1.5, 1.6, 1.6, 1.6)
    assert further.train().step == 5
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step-00000005", "step-00000008"]


def test_a_run_without_a_finite_loss_stops_and_says_so(small: Small, tmp_path: Path) -> None:
    said: list[str] = []
    run = Trainer(small(run={"steps": 9}, validation=PATIENT), ALONE, warn=said.append)
    assert scripted(run, *[float("nan")] * 2).train().step == 2
    (line,) = [line for line in said if "early stopping" in line]
    assert "no validation loss was finite" in line
    assert all(one["validation_loss"] is None for one in log(tmp_path / "run"))
    assert [path.name for path in checkpoints(tmp_path / "run/checkpoints")] == ["step-00000002"]


def test_the_best_model_may_be_kept_without_stopping_and_left_with_it(small: Small, tmp_path: Path) -> None:
    for keep, end in ((True, 2), (False, 6)):
        validation = {"share": 0.1, "every": 2, "keep_best": keep} | ({} if keep else {"patience": 9})
        run = Trainer(small(run={"out": str(tmp_path / str(keep))}, validation=validation), ALONE)
        assert scripted(run, 1.0, 2.0, 3.0).train().step == end
    assert next(one.name for one in checkpoints(tmp_path / "True/checkpoints")) == "step-00000002"


def test_a_best_checkpoint_that_is_gone_leaves_the_last_model(small: Small, tmp_path: Path) -> None:
    said: list[str] = []
    config = small(validation={"share": 0.1, "every": 2, "keep_best": True})
    run = scripted(Trainer(config, ALONE), 1.0, 2.0, 3.0)
    run.train()
    (tmp_path / "run/checkpoints/step-00000002" / SHARE).write_bytes(b"")
    again = Trainer(config, ALONE, resume=True, warn=said.append)
    assert again.train().step == 6
    assert any("has no checkpoint: the model is of the last one" in line for line in said)
    last = masters(tmp_path / "run/checkpoints/step-00000006")
    for name, weight in load(save_model(again))[0].named_parameters():
        assert torch.equal(weight.flatten(), last[name].to(weight.dtype)), name


def test_the_best_adapter_is_the_one_that_is_merged(tune: Tune, tmp_path: Path) -> None:
    validation = {"share": 0.1, "every": 1, "keep_best": True}
    run = scripted(Trainer(tune("style", lora={"rank": 2}, validation=validation), ALONE), 3.0, 1.0, 2.0, 2.0)
    run.train()
    save_model(run)
    best = masters(tmp_path / "run/checkpoints/step-00000002")
    adapter = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    found, wanted = ({one.flatten().numpy().tobytes() for one in each.values()} for each in (adapter, best))
    assert found == wanted
    assert any(one.abs().max() > 0 for name, one in adapter.items() if "lora_B" in name)


def test_a_resumed_run_goes_on_with_what_validation_has_found(small: Small, tmp_path: Path) -> None:
    """Bit for bit, and with the patience that was left."""
    validation = {"share": 0.1, "every": 2, "patience": 3}
    through = Trainer(small(run={"out": str(tmp_path / "through")}, validation=validation), ALONE)
    through.train()
    cut = small(run={"out": str(tmp_path / "cut")}, validation=validation)
    cut_off(Trainer(cut, ALONE), 5)
    Trainer(cut, ALONE, resume=True).train()
    assert log(tmp_path / "cut") == log(tmp_path / "through")
    names = [sorted(one.name for one in (tmp_path / run / "checkpoints").iterdir()) for run in ("cut", "through")]
    assert names[0] == names[1]
    patient = small(run={"steps": 9}, validation=PATIENT | {"patience": 4})
    first = scripted(Trainer(patient, ALONE), 1.0, 2.0, 2.0, 2.0)
    cut_off(first, 4)
    resumed = Trainer(patient, ALONE, resume=True)
    assert resumed.position.step == 3
    scripted(resumed, 2.0, 2.0).train()
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_other_validation_data_begins_anew(small: Small, apart: Path, tmp_path: Path) -> None:
    said: list[str] = []
    Trainer(small(run={"steps": 4}), ALONE).train()
    validation = {"folder": str(apart), "every": 1, "patience": 1}
    added = scripted(Trainer(small(validation=validation), ALONE, resume=True, warn=said.append), 1.0, 2.0)
    added.train()
    assert not any("begin anew" in line for line in said)
    write_exercises(tmp_path / "other", 30, tokenizer_folder=added.start.tokenizer, seed=5)
    other = validation | {"folder": str(tmp_path / "other")}
    run = Trainer(small(run={"steps": 8}, validation=other), ALONE, resume=True, warn=said.append)
    assert any("begin anew" in line for line in said)
    assert not run.is_over


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({"folder": "TRAINED"}, r"holds what the run trains on; give other data, or hold a part of it out with"),
        ({"folder": "nowhere"}, r"nowhere holds no tokenized data; make it with `strata data`"),
        ({"folder": "PAIRS"}, r"holds data of the kind 'preference'; this run needs 'chat'"),
        ({"share": 0.999}, r"of which a share of 0\.999 leaves none to train on"),
    ],
)
def test_validation_data_that_does_not_fit_is_refused(
    tune: Tune, toy: Path, tmp_path: Path, validation: dict[str, Any], message: str
) -> None:
    folders = {"TRAINED": str(toy / "style"), "PAIRS": str(toy / "short")}
    given = {name: folders.get(value, value) for name, value in validation.items()}
    with pytest.raises(ValueError, match=message):
        Trainer(tune("style", validation=given), ALONE)
    assert not (tmp_path / "run").exists()


def test_a_run_of_epochs(small: Small, exercises: Path, tmp_path: Path) -> None:
    """Has each sample as often, goes on when there are more of them, and is not gone on with by steps."""
    epochs = {"steps": None, "epochs": 0.5, "checkpoint_every": 50}
    run = Trainer(small(run=epochs), ALONE)
    half = run.train()
    assert half.step == run.steps
    assert half.tokens == pytest.approx(TokenDataset(exercises).tokens / 2, rel=0.1)
    longer = Trainer(small(run=epochs | {"epochs": 1}), ALONE, resume=True)
    assert longer.position == half
    through = Trainer(small(run=epochs | {"epochs": 1, "out": str(tmp_path / "through")}, schedule={"decay": 0}), ALONE)
    assert longer.steps == through.steps > run.steps
    assert TokenDataset(exercises).tokens <= through.train().tokens < 1.1 * TokenDataset(exercises).tokens
    with pytest.raises(ValueError, match=r"order\.by_epoch was True and is now None"):
        Trainer(small(run={"steps": 40}), ALONE, resume=True)
    with pytest.raises(ValueError, match=r"= 200 exceeds run\.steps = \d+, which is what run\.epochs = 1 come to"):
        Trainer(small(run=epochs | {"epochs": 1}, schedule={"decay": 198}), ALONE, resume=True)
