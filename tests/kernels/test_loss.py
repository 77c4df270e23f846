"""Cross-entropy in chunks against cross-entropy of the full logits: values, gradients, and what exists at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.embedding import embedding
from strata.kernels.loss import loss
from strata.kernels.loss.loss import linear_cross_entropy


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of a vocabulary of 37 at a time."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 3 * 37 + 5)


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Minus the log-probability of the target, written out."""
    logits = hidden @ weight.t()
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    picked = probabilities[torch.arange(len(targets)), targets.long().clamp(min=0)]
    return torch.where(targets == -100, 0, -picked.log())


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, upstream: torch.Tensor) -> list[Any]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    value = function(*leaves)
    value.backward(upstream)
    return [value.detach(), *(leaf.grad for leaf in leaves[:2])]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 7, 20])
def test_values_and_gradients(tokens: int, dtype: torch.dtype, index: torch.dtype) -> None:
    hidden, weight = torch.randn(tokens, 9, dtype=dtype), torch.randn(37, 9, dtype=dtype)
    targets = torch.randint(0, 37, (tokens,), dtype=index)
    targets[1::4] = -100
    upstream = torch.randn(tokens, dtype=dtype)
    found = gradients(linear_cross_entropy, hidden, weight, targets, upstream=upstream)
    wanted = gradients(plain, hidden, weight, targets, upstream=upstream)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9 if dtype == torch.float64 else 2e-5, atol=1e-5)
    assert not found[0][1::4].any()
    assert not found[1][1::4].any()


@pytest.mark.usefixtures("small_chunks")
def test_bfloat16_loses_no_more_than_the_full_logits_do() -> None:
    hidden, weight = torch.randn(50, 64), torch.randn(37, 64) / 8
    targets, upstream = torch.randint(0, 37, (50,)), torch.full((50,), 1 / 50)
    exact = gradients(plain, hidden, weight, targets, upstream=upstream)
    narrow = (hidden.bfloat16(), weight.bfloat16())
    found = gradients(linear_cross_entropy, *narrow, targets, upstream=upstream)
    full = gradients(linear_cross_entropy.reference, *narrow, targets, upstream=upstream)
    assert found[0].dtype == torch.float32
    for mine, theirs, truth in zip(found, full, exact, strict=True):
        assert (mine.float() - truth).norm() < 1.2 * (theirs.float() - truth).norm() + 1e-6


@pytest.mark.usefixtures("small_chunks")
def test_a_tied_weight_gathers_both_gradients() -> None:
    tokens, targets = torch.randint(0, 37, (11,)), torch.randint(0, 37, (11,))
    grads = []
    for function in (linear_cross_entropy, plain):
        weight = torch.linspace(-1, 1, 37 * 5, dtype=torch.float64).sin().view(37, 5).requires_grad_()
        function(embedding(tokens, weight), weight, targets).mean().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(*grads)


def test_all_ignored_gives_zero_and_no_nan() -> None:
    found = gradients(
        linear_cross_entropy, torch.randn(4, 6), torch.randn(9, 6), torch.full((4,), -100), upstream=torch.ones(4)
    )
    assert all(torch.equal(x, torch.zeros_like(x)) for x in found)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.randn(5, 8) * 100, torch.randn(9, 8) * 100
    targets = torch.randint(0, 9, (5,))
    torch.testing.assert_close(
        linear_cross_entropy.bind("cpu", differentiable=True)(hidden, weight, targets),
        F.cross_entropy(hidden @ weight.t(), targets, reduction="none"),
    )


class LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.usefixtures("small_chunks")
def test_the_full_logits_never_exist() -> None:
    hidden, weight = torch.randn(100, 4, requires_grad=True), torch.randn(37, 4, requires_grad=True)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, torch.randint(0, 37, (100,))).sum().backward()
    assert largest.elements == 400  # the hidden states; the logits would be 3700


def test_cost_is_the_hand_count() -> None:
    hidden, weight = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((7, 64), (50, 64)))
    targets = torch.empty(7, dtype=torch.int64, device="meta")
    cost = linear_cross_entropy.cost(hidden, weight, targets, workload=Workload((7,), (7,)))
    assert cost == Cost(7 * 64 * 50 * 2 + 7 * 50 * 3, 896 + 6400 + 56, 28, 6400)
    assert linear_cross_entropy(hidden, weight, targets).shape == (7,)
