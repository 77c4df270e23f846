"""What T6 trains on and how its figures are counted."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import train_plain
from strata.bench.training import workload as train_workload
from strata.bench.training.workload import TrainingWork, learning_rate, synthetic_batch, synthetic_tokens
from strata.hardware.specs import device
from strata.models.families import build
from strata.plan.meta_model import find_config


def test_tokens_are_those_of_the_plain_script() -> None:
    for step in (0, 7):
        tokens, targets = synthetic_tokens(step, 2, 300, 128256)
        others = train_plain.tokens_of(step, 2, 300, 128256)
        assert torch.equal(tokens, others[0].flatten())
        assert torch.equal(targets, others[1].flatten())
    assert not torch.equal(tokens, synthetic_tokens(8, 2, 300, 128256)[0])


def test_batch_holds_these_tokens_in_equal_sequences() -> None:
    packed = synthetic_batch(7, 2, 300, 128256)
    batch, rows, targets = packed.to(torch.device("cpu"))
    tokens, wanted = synthetic_tokens(7, 2, 300, 128256)
    assert torch.equal(batch.tokens, tokens.int())
    assert torch.equal(targets, wanted)
    assert rows.tolist() == list(range(600))
    assert batch.positions.tolist() == [*range(300), *range(300)]
    assert batch.offsets.tolist() == [0, 300, 600]


def test_nine_tokens_in_ten_follow_from_the_one_before() -> None:
    tokens, targets = synthetic_tokens(3, 4, 5000, 1000)
    assert len(tokens.unique()) == train_workload.CYCLE
    pairs = torch.stack([tokens, targets]).unique(dim=1, return_counts=True)[1]
    likely = pairs.sort(descending=True).values[: train_workload.CYCLE].sum() / len(tokens)
    assert likely == pytest.approx(0.9, abs=0.01)


def test_rates_are_those_of_the_plain_script() -> None:
    assert learning_rate(0) == pytest.approx(1e-5 / 20)
    assert learning_rate(19) == learning_rate(500) == pytest.approx(1e-5)


def test_flops_and_floor_by_hand() -> None:
    config = find_config("1B")
    with torch.device("meta"):
        model = build(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == 1_498_482_688
    work = TrainingWork(config, 16384, 8192, parameters - 128256 * 2048, parameters)
    assert work.flops_per_token == 6 * 1_235_814_400 + 6 * 16 * 2048 * 8192
    seconds = 16384 * work.flops_per_token / 800e12 + 28 * parameters / 4.28e12
    assert math.isclose(work.floor(device("h200"), "bf16"), seconds)
    layers = 1_235_814_400 - 128256 * 2048
    saved = 16384 * 6 * layers * (1 / 800e12 - 1 / 1470e12)
    assert math.isclose(work.floor(device("h200"), "fp8-row"), seconds - saved)
    # The figure of the peers: 54,138 tokens a second are 49.41 % of 989 TFLOP/s.
    assert 54138.2 * work.flops_per_token / 989e12 == pytest.approx(0.4941, abs=1e-4)
