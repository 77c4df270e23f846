"""DPO against the formula written out, one reply at a time and without packing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strata.comm import collectives
from strata.comm.launch import World
from strata.files.toml_tables import read_table
from strata.models.config import read_config
from strata.models.layers import CausalLM
from strata.models.weights import load
from strata.parallel.data_parallel import all_ranks
from strata.parallel.layout import Layout
from strata.train.config import TrainConfig
from strata.train.data.encoding import Document, Encoded
from strata.train.data.loader import DataPosition, LoadedStep, Loader, OnceLoader
from strata.train.data.mixture import Mixture
from strata.train.data.pack import PackedBatch, Samples, pack
from strata.train.data.shards import TokenDataset
from strata.train.data.tokenize import tokenize
from strata.train.dpo import DpoConfig, DpoObjective, Reference, dpo_loss, weights_digest
from strata.train.optimizer.config import OptimizerConfig
from strata.train.steps.make import make_step, values_of
from strata.train.steps.objective import Objective
from strata.train.steps.parallel_step import ParallelStep
from strata.train.trainer import Trainer
from tests.parallel.ranks import run_ranks
from tests.train.plain_losses import ALONE, loss_of_pack
from tests.train.samples import sample, write_lines
from tests.train.tiny_run import Table, write_files

CONFIG = DpoConfig(beta=0.3, label_smoothing=0.1)


@pytest.fixture(scope="module")
def mixture(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    out = tmp_path_factory.mktemp("pairs")
    pairs = [
        {"prompt": f"the {word}?", "chosen": f"quick {word}", "rejected": f"lazy {word} dog over"}
        for word in ("fox", "box", "jugs", "dozen", "brown", "five", "liquor")
    ]
    write_lines(out / "a.jsonl", pairs)
    tokenize([out / "a.jsonl"], folder, out / "shards", bytes_per_shard=200)
    return Mixture([TokenDataset(out / "shards")], [1.0], seed=0)


def step_of(mixture: Mixture, packs: int) -> LoadedStep:
    return Loader(mixture, 96, packs, 7).step(DataPosition())


def step_over(model: CausalLM, folder: Path, objective: Objective | None = None) -> ParallelStep:
    """Of one device, from the values of a model of that folder's shape."""
    mesh, optimizer = Layout().mesh(ALONE), OptimizerConfig(learning_rate=1.0)
    return make_step(read_config(folder), Layout(), mesh, optimizer, values_of(model), objective=objective)


def reference_of(folder: Path, mixture: Mixture, cache: Path, base: str) -> Reference:
    step = step_over(load(folder, "cpu", torch.float32)[0], folder)
    axis, found = all_ranks(Layout().mesh(ALONE)), Reference()
    found.compute(step.logprobs, OnceLoader(mixture, [0], 96, 2, 7), mixture, cache, base, axis, axis)
    return found


def numbers_of(step: LoadedStep) -> list[int]:
    """The pairs of a step."""
    return [number for batch in step.batches if batch.samples for number in batch.samples.numbers.tolist()]


def plain_logprob(model: CausalLM, document: Document) -> Tensor:
    offsets = np.array([0, len(document.tokens)])
    batch, _, _ = pack(Encoded(document.tokens, document.loss_mask, offsets)).to(torch.device("cpu"))
    each = model.head(model(batch)).log_softmax(-1)[:-1]
    chosen = each.gather(1, torch.from_numpy(document.tokens[1:].astype(np.int64))[:, None])[:, 0]
    return (chosen * torch.from_numpy(document.loss_mask[1:])).sum()


def test_loss_and_gradient_equal_a_plain_script(folder: Path, mixture: Mixture, tmp_path: Path) -> None:
    base, _ = load(folder, "cpu", torch.float32)
    reference = reference_of(folder, mixture, tmp_path / "reference.safetensors", "base")
    model, _ = load(folder, "cpu", torch.float32)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    step = step_of(mixture, 3)
    objective = DpoObjective(reference, CONFIG)
    pairs = sum(map(objective.count, step.batches))
    for packed in step.batches:
        (loss_of_pack(model, packed, objective) / pairs).backward()
    ours = {name: weight.grad.clone() for name, weight in model.named_parameters()}

    model.zero_grad()
    losses, margins = [], []
    for number in numbers_of(step):
        pair = sample(mixture.datasets[0], number)
        chosen, rejected = (plain_logprob(model, document) for document in pair)
        with torch.no_grad():
            was_chosen, was_rejected = (plain_logprob(base, document) for document in pair)
        margin = 0.3 * ((chosen - was_chosen) - (rejected - was_rejected))
        losses.append(-0.9 * torch.log(torch.sigmoid(margin)) - 0.1 * torch.log(torch.sigmoid(-margin)))
        margins.append(margin.detach())
    expected = torch.stack(losses).mean()
    expected.backward()
    assert pairs == len(losses) > 3
    for name, weight in model.named_parameters():
        scale = weight.grad.abs().max()
        assert scale > 0
        assert (ours[name] - weight.grad).abs().max() < 1e-4 * scale, name
    norm = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm().item()
    found = step_over(model, folder, objective)(step.batches, 1e-3)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.norm.item() == pytest.approx(norm, rel=1e-4)
    assert found.metrics["margin"].item() == pytest.approx(torch.stack(margins).mean().item(), rel=1e-4)
    assert found.metrics["preferred"].item() == pytest.approx((torch.stack(margins) > 0).float().mean().item())
    assert found.metrics["counted"].item() == pairs


def test_the_first_step_has_no_margin(folder: Path, mixture: Mixture, tmp_path: Path) -> None:
    model, _ = load(folder, "cpu", torch.float32)
    reference = reference_of(folder, mixture, tmp_path / "reference.safetensors", "base")
    found = step_over(model, folder, DpoObjective(reference, DpoConfig()))(step_of(mixture, 2).batches, 1e-3)
    assert found.loss.item() == pytest.approx(math.log(2), abs=1e-5)
    assert found.metrics["margin"].item() == pytest.approx(0, abs=1e-5)


def test_the_reference_is_computed_once(
    folder: Path, mixture: Mixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "reference.safetensors"
    first = reference_of(folder, mixture, cache, weights_digest(folder))
    numbers = np.arange(7)
    pairs = Samples(numbers, np.zeros_like(numbers), numbers, 0)
    calls: list[int] = []
    whole = ParallelStep.logprobs
    monkeypatch.setattr(ParallelStep, "logprobs", lambda self, batches: (calls.append(1), whole(self, batches))[1])
    again = reference_of(folder, mixture, cache, weights_digest(folder))
    assert torch.equal(first.of(pairs), again.of(pairs))
    assert not calls
    reference_of(folder, mixture, cache, "another model")
    assert calls


def test_label_smoothing_and_settings() -> None:
    policy, reference = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.0]])
    loss, margin = dpo_loss(policy, reference, DpoConfig(beta=0.5))
    assert margin.item() == pytest.approx(1.0)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-1)))
    smooth, _ = dpo_loss(policy, reference, DpoConfig(beta=0.5, label_smoothing=0.25))
    assert smooth.item() == pytest.approx(0.75 * math.log(1 + math.exp(-1)) + 0.25 * math.log(1 + math.exp(1)))
    with pytest.raises(ValueError, match=r"dpo\.beta = 0"):
        DpoConfig(beta=0.0)
    with pytest.raises(ValueError, match=r"must lie in \[0, 0\.5\)"):
        DpoConfig(label_smoothing=0.5)


def events(world: World, folder: Path, table: Table, alone: Table) -> list[str]:
    """What this rank does until the first step could begin: "pass" of the model, "wait" for the other ranks; and how
    it begins again from what the first beginning has left. One rank then begins a run of its own.
    """
    found: list[str] = []
    logprobs, wait = ParallelStep.logprobs, collectives.Pending.wait

    def noted_logprobs(self: ParallelStep, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        found.extend(["pass"] * len(batches))
        return logprobs(self, batches)

    def noted_wait(self: collectives.Pending) -> torch.Tensor:
        found.extend(["wait"] * len(self.works))
        return wait(self)

    ParallelStep.logprobs, collectives.Pending.wait = noted_logprobs, noted_wait
    config = read_table(TrainConfig, table)
    Trainer(config, world)
    found.append("again")
    Trainer(config, world)
    told = found.copy()
    if world.is_main:
        Trainer(read_table(TrainConfig, alone), World(0, 0, 1, world.device, None))
    return told


def test_ranks_share_the_reference_and_meet_after_every_batch(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files")
    data = {"sources": [{"folder": str(files.pairs)}]}
    table = files.tuning(tmp_path / "three", data=data, dpo={"beta": 0.3}, parallel={"dp": 3})
    table["data"]["packs_per_step"] = 3
    alone = files.tuning(tmp_path / "one", data=data, dpo={"beta": 0.3})
    ranks = run_ranks(events, 3, tmp_path, table=table, alone=alone)
    passes = []
    for found in ranks:
        first, again = " ".join(found).split("again")
        assert "pass pass" not in first, "one batch between two meetings is the longest that another rank waits"
        assert "pass" not in again
        passes.append(first.count("pass"))
    assert max(passes) - min(passes) <= 1
    one, three = (load_file(tmp_path / name / "reference.safetensors") for name in ("one", "three"))
    assert sum(passes) > 6
    assert one.keys() == three.keys()
    assert all(torch.equal(three[key], values) and len(values) == 100 for key, values in one.items())
