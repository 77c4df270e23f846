"""Operations of the training step against float64 formulas, on the CPU: the loss with its gradients, and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from strata.hardware.roofline import Cost, Workload
from strata.kernels.loss.loss_grad import _LossWithGradients, _row_chunks, cross_entropy_gradients, summed_cross_entropy
from strata.kernels.optimizer.adamw import Constants, adamw

WORK = Workload((7,), (7,))


def test_loss_and_gradients_are_those_of_the_log_probabilities() -> None:
    hidden, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((20, 9), (37, 9)))
    targets = torch.randint(0, 37, (20,))
    targets[1::4] = -100
    scale = torch.tensor(0.3)
    counted = targets != -100
    probabilities = (hidden @ weight.t()).softmax(-1)[counted]
    wanted = -0.3 * probabilities[torch.arange(len(probabilities)), targets[counted]].log().sum()
    wanted.backward()
    loss, of_hidden, of_weight = cross_entropy_gradients(hidden.detach(), weight.detach(), targets, scale, 1 << 20)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(of_hidden, hidden.grad, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of_weight, weight.grad, rtol=1e-6, atol=1e-9)
    assert not of_hidden[1::4].any()


@pytest.mark.parametrize("adds", [False, True])
def test_the_gradient_of_the_head_goes_to_its_place(adds: bool) -> None:
    hidden, weight, memory = torch.randn(20, 9), torch.randn(37, 9), torch.randn(37, 9)
    targets, scale = torch.randint(0, 37, (20,)), torch.tensor(0.3)
    loss, of_hidden, of_weight = cross_entropy_gradients(hidden, weight, targets, scale, 1 << 20)
    wanted = memory + of_weight if adds else of_weight
    found = cross_entropy_gradients(hidden, weight, targets, scale, 1 << 20, (memory, adds))
    assert found[2] is memory
    for mine, other in zip(found, (loss, of_hidden, wanted), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize(("tokens", "most", "sizes"), [
    (0, 9, []),
    (5, 9, [5]),
    (16384, 16384, [16384]),
    (16384, 9000, [8192, 8192]),
    (10000, 4000, [3584, 3584, 2832]),
    (3, 0, [1, 1, 1]),
    (700, 300, [256, 256, 188]),
])  # fmt: skip
def test_chunks_cover_all_rows_and_hold_no_more_than_allowed(tokens: int, most: int, sizes: list[int]) -> None:
    rows = list(_row_chunks(tokens, most))
    assert [chunk.stop - chunk.start for chunk in rows] == sizes
    assert all(after.start == before.stop for before, after in pairwise(rows))


def test_cost_of_the_loss_is_the_hand_count() -> None:
    hidden, weight = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((7, 64), (50, 64)))
    targets, scale = torch.empty(7, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
    cost = cross_entropy_gradients.cost(hidden, weight, targets, scale, 1 << 20, workload=WORK)
    assert cost == Cost(3 * 7 * 64 * 50 * 2 + 7 * 50 * 5, 896 + 6400 + 56, 4 + 896 + 6400, 6400)
    shapes = [tuple(one.shape) for one in cross_entropy_gradients(hidden, weight, targets, scale, 1 << 20)]
    assert shapes == [(), (7, 64), (50, 64)]
    # In float32, added to what is there.
    place = torch.empty(50, 64, device="meta"), True
    cost = cross_entropy_gradients.cost(hidden, weight, targets, scale, 1 << 20, place, workload=WORK)
    flops = 3 * 7 * 64 * 50 * 2 + 7 * 50 * 5 + 50 * 64
    assert cost == Cost(flops, 896 + 6400 + 56 + 12800, 4 + 896 + 12800, 6400)


@pytest.mark.parametrize("run", [summed_cross_entropy, summed_cross_entropy.reference, _LossWithGradients.apply])
def test_the_summed_loss_and_its_gradients(run: Callable[..., torch.Tensor]) -> None:
    """In every way, also with a gradient that is not 1. On a CPU the way of a GPU goes through the reference."""
    hidden, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((20, 9), (37, 9)))
    targets = torch.randint(0, 37, (20,))
    targets[1::4] = -100
    scale = torch.tensor(0.3, dtype=torch.float64)
    wanted = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum") * scale
    of_wanted = torch.autograd.grad(wanted * 2, (hidden, weight))
    found = run(hidden, weight, targets, scale)
    torch.testing.assert_close(found, wanted)
    for mine, theirs in zip(torch.autograd.grad(found * 2, (hidden, weight)), of_wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_summed_loss_computes_no_gradient_that_nobody_wants() -> None:
    hidden, weight = (torch.randn(s, dtype=torch.bfloat16) for s in ((6, 9), (5, 9)))
    hidden.requires_grad_()
    targets, scale = torch.randint(0, 5, (6,)), torch.tensor(0.5)
    bound = summed_cross_entropy.bind("cuda", differentiable=True)
    assert bound.choose(hidden, weight, targets, scale).name == "chunks"
    assert bound.choose(hidden, weight.clone().requires_grad_(), targets, scale).name == "gradients at once"


def test_cost_of_the_summed_loss_is_the_hand_count() -> None:
    hidden, weight = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((7, 64), (50, 64)))
    targets, scale = torch.empty(7, dtype=torch.int64, device="meta"), torch.empty((), device="meta")
    cost = summed_cross_entropy.cost(hidden, weight, targets, scale, workload=WORK)
    assert cost == Cost(7 * 64 * 50 * 2 + 7 * 50 * 3 + 8, 896 + 6400 + 56 + 4, 4, 6400)
    assert summed_cross_entropy(hidden, weight, targets, scale).shape == ()


def test_adamw_is_the_published_algorithm() -> None:
    """Three steps in float64 (Loshchilov and Hutter 2019, algorithm 2)."""
    weight = torch.randn(50).bfloat16()
    master, first, second = weight.float(), torch.zeros(50), torch.zeros(50)
    exact, m, v = master.double(), torch.zeros(50).double(), torch.zeros(50).double()
    for t in range(1, 4):
        gradient, rate, factor = torch.randn(50).bfloat16(), 0.01 / t, 0.5 * t
        step = torch.tensor([rate, 1 - 0.9**t, 1 - 0.95**t, factor])
        found = adamw(weight, master, first, second, gradient, step, Constants(0.9, 0.95, 1e-8, 0.1))
        g = gradient.double() * factor
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        exact = exact - rate * (m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8) + 0.1 * exact)
        assert found is weight
        torch.testing.assert_close(master.double(), exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(weight, master.bfloat16())


def test_cost_of_adamw_is_the_hand_count() -> None:
    weight = torch.empty(100, dtype=torch.bfloat16, device="meta")
    wide = torch.empty(100, device="meta")
    cost = adamw.cost(weight, wide, wide, wide, weight, torch.empty(4), Constants(0.9, 0.95, 1e-8, 0.1), workload=WORK)
    assert (cost.read, cost.written) == (1400, 1400)
