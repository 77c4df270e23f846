"""Operations of the training step: losses in chunks, gradients that are written where they are wanted, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strata.hardware.roofline import Cost, Workload
from strata.kernels.gradient_target import GradientTarget
from strata.kernels.linear import fp8 as fp8_file
from strata.kernels.linear import into as into_file
from strata.kernels.linear.embedding import embedding
from strata.kernels.linear.fp8 import linear_fp8, linear_fp8_into
from strata.kernels.linear.into import linear_into, linear_silu_mul_into
from strata.kernels.loss import loss as loss_file
from strata.kernels.loss.loss import (
    _LossWithGradients,
    _row_chunks,
    cross_entropy_gradients,
    linear_cross_entropy,
    summed_cross_entropy,
)
from strata.kernels.optimizer.adamw import Constants, adamw
from tests.kernels.launches.noted import empty as meta

WORK = Workload((7,), (7,))
wide = partial(meta, dtype=torch.float32)


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


LOGITS, NARROW = 7 * 64 * 50 * 2, (meta(7, 64), meta(50, 64), meta(7, dtype=torch.int64))
SCALED, PLACE = (*NARROW, wide()), (wide(50, 64), True)
# The place of a gradient is float32, and what is there is added to.
COSTS: list[tuple[Any, tuple[Any, ...], Cost, list[tuple[int, ...]]]] = [
    (linear_cross_entropy, NARROW, Cost(LOGITS + 7 * 50 * 3, 896 + 6400 + 56, 28, 6400), [(7,)]),
    (summed_cross_entropy, SCALED, Cost(LOGITS + 7 * 50 * 3 + 8, 896 + 6400 + 56 + 4, 4, 6400), [()]),
    (
        cross_entropy_gradients,
        (*SCALED, 1 << 20),
        Cost(3 * LOGITS + 7 * 50 * 5, 896 + 6400 + 56, 4 + 896 + 6400, 6400),
        [(), (7, 64), (50, 64)],
    ),
    (
        cross_entropy_gradients,
        (*SCALED, 1 << 20, PLACE),
        Cost(3 * LOGITS + 7 * 50 * 5 + 50 * 64, 896 + 6400 + 56 + 12800, 4 + 896 + 12800, 6400),
        [(), (7, 64), (50, 64)],
    ),
    (
        adamw,
        (meta(100), *(wide(100) for _ in range(3)), meta(100), wide(4), Constants(0.9, 0.95, 1e-8, 0.1)),
        Cost(1600, 1400, 1400, 400),
        [(100,)],
    ),
]


@pytest.mark.parametrize(("operation", "given", "cost", "shapes"), COSTS)
def test_costs_are_the_hand_counts(operation: Any, given: tuple[Any, ...], cost: Cost, shapes: list[Any]) -> None:
    assert operation.cost(*given, workload=WORK) == cost
    results = operation(*given)
    assert [tuple(one.shape) for one in (results if isinstance(results, tuple) else (results,))] == shapes


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


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of a vocabulary of 37 at a time."""
    monkeypatch.setattr(loss_file, "CHUNK_ELEMENTS", 3 * 37 + 5)


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


class Target:
    """A `GradientTarget` of one weight: poisoned memory, or what it holds already."""

    def __init__(self, weight: Tensor, held: Tensor | None = None) -> None:
        self.gradient = torch.full_like(weight, float("nan"), requires_grad=False) if held is None else held.clone()
        self.adds, self.times = held is not None, 0

    def memory(self) -> tuple[Tensor, bool]:
        return self.gradient, self.adds or self.times > 0

    def written(self) -> None:
        self.times += 1


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight.t() + (0 if bias is None else bias)


def plain_gated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = plain_linear(x, weight, bias).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


Into = Callable[[Tensor, Tensor, Tensor | None, GradientTarget], Tensor]


@pytest.mark.parametrize(("into", "plain"), [(linear_into, plain_linear), (linear_silu_mul_into, plain_gated)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("rows", "width", "out"), [(1, 3, 2), (17, 5, 14)])
def test_gradients_equal_those_of_autograd(
    into: Into, plain: Callable[..., Tensor], with_bias: bool, adds: bool, rows: int, width: int, out: int
) -> None:
    draw = torch.Generator().manual_seed(rows + adds)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((rows, width), (out, width), (out,))
    )
    leaves = [x.requires_grad_(), weight.requires_grad_(), *([bias.requires_grad_()] if with_bias else [])]
    result = plain(x, weight, bias if with_bias else None)
    slope = torch.randn(result.shape, dtype=torch.float64, generator=draw)
    wanted = torch.autograd.grad(result, leaves, slope)
    held = torch.randn(out, width, dtype=torch.float64, generator=draw) if adds else None
    target = Target(weight, held)
    made = into(x, weight, bias if with_bias else None, target)
    torch.testing.assert_close(made, result, rtol=1e-12, atol=1e-12)
    made.backward(slope)
    assert target.times == 1
    assert weight.grad is None
    torch.testing.assert_close(target.gradient, wanted[1] + (held if held is not None else 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, wanted[0], rtol=1e-12, atol=1e-12)
    if with_bias:
        torch.testing.assert_close(bias.grad, wanted[2], rtol=1e-12, atol=1e-12)


def test_two_uses_of_a_weight_add_up() -> None:
    x, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    target = Target(weight)
    (linear_into(x, weight, None, target).sum() + linear_into(2 * x, weight, None, target).sum()).backward()
    torch.testing.assert_close(target.gradient, 3 * x.sum(0).expand(2, 3))


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_gradients_in_eight_bits_are_those_of_the_layer(per_row: bool, adds: bool) -> None:
    x, weight, slope = torch.randn(32, 48), torch.randn(16, 48), torch.randn(32, 16)
    one, other = (x.clone().requires_grad_() for _ in range(2))
    weight.requires_grad_()
    linear_fp8(one, weight, None, per_row).backward(slope)
    held = torch.randn(16, 48) if adds else None
    target = Target(weight, held)
    wanted, weight.grad = weight.grad, None
    linear_fp8_into(other, weight, None, per_row, target).backward(slope)
    assert weight.grad is None
    assert target.times == 1
    assert torch.equal(target.gradient, wanted if held is None else wanted + held)
    assert torch.equal(one.grad, other.grad)


Product = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_last_product_is_not_computed_again(eight_bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is its result wrong, or its gradient."""
    x, weight = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    made: list[Tensor] = []
    attached = into_file.with_gradients_of

    def counting(gradients: Tensor, product: Tensor) -> Tensor:
        made.append(product)
        return attached(gradients, product)

    for module in (into_file, fp8_file):
        monkeypatch.setattr(module, "with_gradients_of", counting)
    found = []
    for recompute in (False, True):
        target, given, trained = Target(weight), x.clone().requires_grad_(), weight.clone().requires_grad_()

        def layer(given: Tensor, trained: Tensor = trained, target: Target = target) -> Tensor:
            if eight_bits:
                return given + fp8_file.linear_fp8_into(given.exp(), trained, None, True, target)
            return given + into_file.linear_into(given.exp(), trained, None, target)

        result = checkpoint(layer, given, use_reentrant=False) if recompute else layer(given)
        result.square().sum().backward()
        found.append((result, given.grad, target.gradient))
    assert len(made) == 2
    assert all(map(torch.equal, *found))
    if not eight_bits:
        torch.testing.assert_close(found[0][0], x + x.exp() @ weight.t())
