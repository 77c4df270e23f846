"""A step of one process against plain PyTorch: any split into packs, masters beside bfloat16 weights, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training.workload import synthetic_batch
from strata.comm.launch import World
from strata.models.layers import CausalLM
from strata.parallel.layout import Layout
from strata.train.data.encoding import Encoded
from strata.train.data.pack import PackedBatch, pack
from strata.train.optimizer.config import OptimizerConfig
from strata.train.steps import captured, make
from strata.train.steps.make import fresh, make_step
from strata.train.steps.one_device import OneDeviceGradients
from strata.train.steps.parallel_step import ParallelStep
from tests.parallel.models import config_of, head_weight, random_model
from tests.train.step_ranks import pack_of

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, CPU, None)
RATE = 1e-2
LENGTHS = (5, 1, 9, 3, 7, 2)


def documents() -> list[Encoded]:
    """Random tokens, about two thirds of which count; the first of a document never does."""
    draw = np.random.default_rng(0)
    found = []
    for length in LENGTHS:
        wanted = draw.random(length) < 0.7
        wanted[0] = False
        found.append(Encoded(draw.integers(0, 61, length), wanted, np.array([0, length])))
    return found


def packed(chosen: Sequence[Encoded]) -> PackedBatch:
    offsets = np.cumsum([0, *(len(one.tokens) for one in chosen)])
    return pack(
        Encoded(
            np.concatenate([one.tokens for one in chosen]), np.concatenate([one.loss_mask for one in chosen]), offsets
        )
    )


def step_of(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> ParallelStep:
    """From the values of `random_model`, or fresh ones where that is said."""
    config = config_of(family)
    options = {"values": lambda *_: random_model(config, dtype).named_parameters(), **options}
    settings = {"learning_rate": RATE, "clip": options.pop("clip", 1e9)}
    layout = Layout()
    values = options.pop("values")
    return make_step(config, layout, layout.mesh(ALONE), OptimizerConfig(**settings), values, dtype=dtype, **options)


def state(step: ParallelStep, kind: str) -> dict[str, Tensor]:
    """Copies of a kind of state, by parameter."""
    return {piece.name: piece.tensor.detach().clone() for piece in step.state_shards() if piece.kind == kind}


def first_gradients(step: ParallelStep, batches: Sequence[PackedBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the first step: beside those the first moment holds nothing yet."""
    loss = step(batches, RATE).loss
    return loss, {name: moment / (1 - 0.9) for name, moment in state(step, "exp_avg").items()}


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models compute in bfloat16 beside float32 masters, as on a GPU."""
    setting = make._Setting
    monkeypatch.setattr(make, "_Setting", lambda *args: replace(setting(*args), compute_dtype=torch.bfloat16))


@pytest.mark.parametrize("family", ["llama", "qwen3-biases-tied", "gpt-oss"])
def test_loss_and_gradients_are_those_of_one_document_at_a_time_however_they_are_packed(family: str) -> None:
    """A twin without packing, row selection or a loss in chunks."""
    model, losses = random_model(config_of(family)), []
    for one in documents():
        batch, _, _ = packed([one]).to(CPU)
        logits = model(batch) @ head_weight(model).t()
        targets = torch.from_numpy(one.tokens[1:])
        each = F.cross_entropy(logits[:-1], targets, reduction="none")
        losses.append(each[torch.from_numpy(one.loss_mask[1:])])
    wanted = torch.cat(losses).mean()
    wanted.backward()
    for splits in ([(0, 6)], [(0, 2), (2, 6)], [(0, 1), (1, 2), (2, 3), (3, 6)]):
        loss, gradients = first_gradients(step_of(family), [packed(documents()[slice(*split)]) for split in splits])
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(gradients[name], parameter.grad.flatten(), rtol=1e-9, atol=1e-12, msg=name)


def test_weights_are_rounded_masters_and_packs_add_up_in_float32(narrow: None) -> None:
    step = step_of("llama", torch.float32)
    model: CausalLM = step._passes._model  # type: ignore[attr-defined]
    batches = [packed(documents()[:3]), packed(documents()[3:])]
    before = state(step, "master")
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    assert not torch.equal(before["model.norm.weight"], model.model.norm.weight.float())  # masters are not rounded
    _, total = first_gradients(step, batches)
    counted = sum(len(one.targets) for one in batches)
    parts = [first_gradients(step_of("llama", torch.float32), [one])[1] for one in batches]
    exact = first_gradients(step_of("llama"), batches)[1]
    for name, gradient in total.items():
        both = sum(part[name] * (len(one.targets) / counted) for part, one in zip(parts, batches, strict=True))
        assert gradient.dtype == torch.float32
        assert (gradient - both).norm() < 0.02 * gradient.norm(), name
        assert (gradient - exact[name]).norm() < 0.1 * gradient.norm(), name
    step.sync_weights()
    for name, master in state(step, "master").items():
        assert torch.equal(model.get_parameter(name).detach().flatten(), master.bfloat16()), name
        assert not torch.equal(master, before[name]), name


def test_small_updates_survive_in_the_masters(narrow: None) -> None:
    """At a rate of 1e-6 a bfloat16 weight near 1 would never move."""
    step = step_of("llama", torch.float32, values=fresh(0))
    before = state(step, "master")["model.norm.weight"]
    step([packed(documents())], 1e-6)
    step.sync_weights()
    moved = (state(step, "master")["model.norm.weight"] - before).abs()
    assert (moved > 5e-7).any()
    weight = step._passes._model.model.norm.weight  # type: ignore[attr-defined]
    assert torch.equal(weight, torch.ones_like(weight))


def test_loss_falls() -> None:
    step = step_of("llama", torch.float32, values=fresh(0), clip=1.0)
    losses = [step([synthetic_batch(index, 8, 32, 61)], RATE).loss.item() for index in range(30)]
    assert losses[0] == pytest.approx(np.log(61), rel=0.05)
    assert np.mean(losses[-3:]) < 0.8 * losses[0]


def test_a_step_without_a_finite_norm_changes_nothing_and_the_next_goes_on() -> None:
    step = step_of("llama", torch.float32)
    step([packed(documents())], RATE)
    before = {kind: state(step, kind) for kind in ("master", "exp_avg", "exp_avg_sq")}
    weight = step._passes._model.model.norm.weight  # type: ignore[attr-defined]
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    assert step([packed(documents())], RATE).norm.isnan()
    handle.remove()
    for kind, tensors in before.items():
        for name, tensor in state(step, kind).items():
            assert torch.equal(tensor, tensors[name]), (kind, name)
    assert step([packed(documents())], RATE).norm.isfinite()
    assert not torch.equal(state(step, "master")["model.norm.weight"], before["master"]["model.norm.weight"])


def test_a_step_in_which_no_token_counts_has_neither_loss_nor_gradient() -> None:
    step = step_of("llama", torch.float32)
    result = step([pack_of(0, [6, 6], 61, 0.0)], RATE)
    assert result.loss == result.norm == result.metrics["counted"] == 0


def test_a_step_restored_from_pieces_goes_on_with_the_same_bits(narrow: None) -> None:
    one, other = (step_of("qwen3-biases-tied", torch.float32) for _ in range(2))
    batches = [packed(documents()[:2]), packed(documents()[2:])]
    for index in range(3):
        one(batches, RATE / (index + 1))
    with torch.no_grad():
        for mine, piece in zip(other.state_shards(), one.state_shards(), strict=True):
            assert (mine.kind, mine.name) == (piece.kind, piece.name)
            mine.tensor.copy_(piece.tensor)
    other.restored(3)
    for index in (3, 4):
        losses = [step(batches, RATE / (index + 1)).loss for step in (one, other)]
        assert torch.equal(*losses)
    for mine, piece in zip(other.state_shards(), one.state_shards(), strict=True):
        assert torch.equal(mine.tensor, piece.tensor), (piece.kind, piece.name)


@pytest.mark.parametrize("precision", ["fp8-tensor", "fp8-row"])
def test_steps_in_eight_bits_follow_the_exact_ones(precision: str) -> None:
    sizes = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 48, "num_attention_heads": 4}
    config, layout = config_of("qwen3-biases-tied", **sizes), Layout()
    wide, other = (
        make_step(config, layout, layout.mesh(ALONE), OptimizerConfig(RATE, clip=0.5), fresh(0), precision=one)
        for one in ("bf16", precision)
    )
    for index in range(3):
        batches = [pack_of(index, [7, 12, 12], 61, 1.0)]
        exact, found = wide(batches, 1e-3), other(batches, 1e-3)
        assert found.loss != exact.loss
        torch.testing.assert_close(found.loss, exact.loss, rtol=2e-3, atol=0)
        torch.testing.assert_close(found.norm, exact.norm, rtol=5e-2, atol=0)


class Replayed:
    """What stands in for `CudaGraphs` without a GPU: a replay calls the function again."""

    def __init__(self) -> None:
        self._runs: dict[str, Callable[[], None]] = {}

    def capture_graph(self, key: str, run: Callable[[], None], between: Callable[[], None] = lambda: None) -> None:
        run()
        between()
        self._runs[key] = run

    def replay(self, key: str) -> None:
        self._runs[key]()


@pytest.mark.parametrize("packs", [1, 2])
@pytest.mark.parametrize("family", ["llama", "llama-biases-tied"])
def test_recorded_steps_are_the_launched_ones(monkeypatch: pytest.MonkeyPatch, family: str, packs: int) -> None:
    """Steps of one shape go over all rows with -100 where none counts; other shapes in between are launched."""
    monkeypatch.setattr(captured, "CudaGraphs", Replayed)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    called: list[int] = []
    steps = [step_of(family, torch.float32, clip=0.05, before_update=lambda: called.append(1)) for _ in range(2)]
    steps[0]._captures = True
    work = [
        [pack_of(packs * index + one, lengths, 61, 0.6) for one in range(packs)]
        for index, lengths in enumerate(([8, 8], [8, 8], [8, 8], [8, 5, 3], *[[8, 8]] * 5, *[[4, 4]] * 9))
    ]
    work.insert(3, [pack_of(60 + one, [8, 8], 61, 0.5) for one in range(3 - packs)])
    was_captured = []
    for index, batches in enumerate(work):
        found, wanted = (step(batches, RATE / (index + 1)) for step in steps)
        was_captured.append(steps[0]._captured is not None)
        for mine, theirs in ((found.loss, wanted.loss), (found.norm, wanted.norm)):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=0)
        assert found.metrics["counted"] == wanted.metrics["counted"] == sum(len(one.targets) for one in batches)
    # After two in a row, then after four, then after eight.
    assert was_captured == [False, True, True, *[False] * 5, True, True, *[False] * 7, True, True]
    assert len(called) == 2 * len(work)
    for name, master in state(steps[0], "master").items():
        torch.testing.assert_close(master, state(steps[1], "master")[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("packs", [1, 3])
def test_a_step_that_may_be_recorded_is_launched_as_a_recording_computes(
    monkeypatch: pytest.MonkeyPatch, packs: int
) -> None:
    """A run that resumes has nothing captured: its first step has the bits of one that is replayed."""
    monkeypatch.setattr(captured, "CudaGraphs", Replayed)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    through, resumed = (step_of("llama", torch.float32) for _ in range(2))
    through._captures = resumed._captures = True
    for index in range(4):
        resumed._before = None
        work = [pack_of(packs * index + one, [8, 8], 61, 0.6) for one in range(packs)]
        found, wanted = (step(work, RATE) for step in (resumed, through))
        assert torch.equal(found.loss, wanted.loss)
        assert torch.equal(found.norm, wanted.norm)
    assert resumed._captured is None
    assert through._captured is not None
    for name, master in state(through, "master").items():
        assert torch.equal(master, state(resumed, "master")[name]), name


def test_gradients_of_several_passes_add_up_in_the_masters_precision() -> None:
    model = nn.Linear(4, 4)
    held = OneDeviceGradients(model, CPU, torch.bfloat16)
    (bias,) = (part for part in held.shards if part.name == "bias")
    for is_last, value in ((False, 1.0), (True, 2**-9)):  # whose sum bfloat16 cannot hold
        if is_last:
            held.set_is_last_backward()
        model.bias.grad = torch.full_like(model.bias, value)
        held.accumulate()
        assert model.bias.grad is None
    held.reduce()
    assert bias.master.grad is not None
    assert bias.master.grad.tolist() == [1 + 2**-9] * 4
    assert held.norm().item() == pytest.approx(2 * (1 + 2**-9), rel=1e-6)
    held.all_gather_weights()
    assert bias.master.grad is None


def test_the_gradient_of_a_single_pass_is_taken_as_it_is() -> None:
    """Sums are used once, and a parameter that nothing reached has zeros."""
    model = nn.Linear(4, 4)
    held = OneDeviceGradients(model, CPU, torch.bfloat16)
    for value in (3.0, 1.0):
        model.bias.grad = given = torch.full_like(model.bias, value)
        held.set_is_last_backward()
        held.accumulate()
        held.reduce()
        found = {part.name: part.master.grad for part in held.shards}
        assert found["bias"] is not None
        assert found["weight"] is not None
        assert found["bias"].dtype == torch.bfloat16
        assert found["bias"].data_ptr() == given.data_ptr()
        assert not found["weight"].any()
        assert held.norm().dtype == torch.float32
        assert held.norm() == 2 * value
        held.sync_weights()


def test_weights_become_rounded_masters_when_they_are_published() -> None:
    model = nn.Linear(4, 4)
    values = {name: one.detach().clone() for name, one in model.named_parameters()}
    held = OneDeviceGradients(model, CPU, torch.bfloat16)
    with torch.no_grad():
        for part in held.shards:
            assert torch.equal(part.master, values[part.name].flatten())
            part.master.mul_(3)
    held.sync_weights()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter.detach(), (3 * values[name]).bfloat16())
