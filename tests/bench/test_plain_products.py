"""What products of packed weights would take by plain ones, counted by hand."""

from __future__ import annotations

import pytest
import torch

from strata.bench.explain.plain_products import product_here, unpacked_products
from strata.cost.step_model import StepSeconds
from strata.models.folder import folder_or_shape
from strata.plan.explain.measurement import MeasuredStep, StepChunk
from strata.plan.meta_model import find_config, meta_model
from tests.plan.explain.runs import DEVICE

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 256, 704, 8, 2, 32, 5, 4096
LAYER = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER


def step(sequences: int, tokens: int) -> MeasuredStep:
    return MeasuredStep(0.0, 1.0, tuple(StepChunk(one, 0, tokens, 1) for one in range(sequences)))


def of(quantization: str | None) -> StepSeconds:
    config = find_config(folder_or_shape("builtin"))
    return StepSeconds(meta_model(config, None, torch.bfloat16, quantization=quantization), DEVICE)


def test_every_product_of_every_step_counts() -> None:
    """A product takes as many seconds as it multiplies. The last layer's rows behind attention, and the head's, are
    those that are drawn from."""
    steps = (step(2, 30), step(2, 1), step(2, 1), step(2, 1))
    found = unpacked_products(steps, of("int4"), lambda rows, out, width: float(rows * out * width), asked=True)
    assert found is not None
    kept = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM  # q, k and v of the last layer, of all its tokens
    tokens, drawn = 2 * 30 + 3 * 2, 4 * 2
    wanted = tokens * ((LAYERS - 1) * LAYER + kept) + drawn * (LAYER - kept + VOCABULARY * HIDDEN)
    assert (found.values, found.operation, found.asked) == ("int4", "linear", True)
    assert found.plain == wanted


def test_plain_weights_are_not_unpacked() -> None:
    def nobody(*_: int) -> float:
        raise AssertionError("no product has to be measured")

    assert unpacked_products((step(1, 1),), of(None), nobody, asked=False) is None


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_product_is_measured_as_it_runs_here(deterministic: bool) -> None:
    seconds = product_here(torch.bfloat16, deterministic)
    assert 0 < seconds(1, 16, 16) < seconds(64, 1024, 512)
