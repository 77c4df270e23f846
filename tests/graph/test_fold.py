"""Weights that follow one another become one, within the bound that is stated for it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from strata.cost.nodes import node_costs
from strata.graph.fold import fold, fold_norm_weights
from strata.graph.merge import merge
from strata.graph.passes import ALL_PASSES
from strata.graph.trace import trace
from strata.graph.walk import operation_counts
from strata.hardware.roofline import Workload
from strata.kernels.norm.norm import rms_norm

from .tiny import LAYERS, Linear, Norm, Tiny, packed

EVERY = ALL_PASSES | {fold_norm_weights.__name__}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bound(weight: Tensor, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What the module states, in float64, of products of `weight` [out, k] and rows."""
    spread = 2 * torch.finfo(dtype).eps / 2 + weight.shape[1] * 2.0**-24
    return spread * (x.abs() @ weight.abs().T + (0 if bias is None else bias.abs()))


class Chain(nn.Module):
    """Two linears, or three; and a pair through so few features that one weight would be larger."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        pairs = pairwise(sizes)
        self.parts = nn.ModuleList(Linear(*pair, bias=bias) for pair in pairs)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Normed(nn.Module):
    """A norm that two products read, and one that is read otherwise, too."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.norm, self.first, self.second, self.shared = Norm(48), Linear(48, 40, True), Linear(48, 40), shared
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        total = self.first(normed) + self.second(normed)
        return total + normed.narrow(-1, 0, 40) if self.shared else total


class Stem(nn.Module):
    """Convolutions, each with a batch norm and a ReLU behind it, as vision towers begin (the last in groups)."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
                nn.Conv2d(16, 24, 3, stride=2, padding=1),
                nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(conv.out_channels) for conv in self.convs)
        for norm in self.norms:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.2, 3.0)
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.batch_norm(conv(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
            x = F.relu(x)
        return x


def folded(model: nn.Module) -> fx.GraphModule:
    graph = trace(model)
    fold(graph, EVERY)
    return graph


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_of_a_linear(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    model, x = Chain(48, 64, 32, bias=bias).to(dtype), torch.randn(9, 48).to(dtype)
    graph = folded(model)
    assert operation_counts(trace(model))["linear"] == 2
    assert operation_counts(graph)["linear"] == 1
    first, second = (part.double() for part in Chain(48, 64, 32, bias=bias).to(dtype).parts)
    for part, own in zip((first, second), model.parts, strict=True):
        part.load_state_dict(own.state_dict())
    exact = second(first(x.double()))
    whole = second.weight @ first.weight
    shift = second.weight @ first.bias + second.bias if bias else None
    assert ((graph(x).double() - exact).abs() <= bound(whole, x.double(), shift, dtype)).all()


def test_counts_of_linears() -> None:
    assert operation_counts(folded(Chain(16, 16, 16, 16)))["linear"] == 1
    assert operation_counts(folded(Chain(16, 4, 16)))["linear"] == 2  # as of LoRA: 256 numbers instead of 128
    graph = trace(Chain(16, 32, 16))
    assert fold(graph, EVERY - {"fold_linears"}) == []
    assert operation_counts(graph)["linear"] == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norms_weight_goes_into_the_products_behind_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Normed().to(dtype), torch.randn(7, 48).to(dtype)
    graph = folded(model)
    weights = [node for node in graph.graph.find_nodes(op="get_attr") if "norm" in str(node.target)]
    assert [getattr(graph.norm, str(node.target).split(".")[1]).unique().tolist() for node in weights] == [[1.0]]
    normed = rms_norm(x, torch.ones(48, dtype=dtype), 1e-6).double()
    for linear in (model.first, model.second):
        weight, bias = linear.weight.double() * model.norm.weight.double(), linear.bias
        only = trace(nn.Sequential(model.norm, linear))
        assert len(fold(only, EVERY)) == 1
        wide = None if bias is None else bias.double()
        exact = F.linear(normed, weight, wide)
        assert ((only(x).double() - exact).abs() <= bound(weight, normed, wide, dtype)).all()
    # Merged behind it, as in steps.
    torch.testing.assert_close(merge(graph)(x), model(x), rtol=0.05, atol=0.05)
    assert operation_counts(graph)["linear"] == 2  # one has a bias


def test_a_norm_that_something_else_reads_keeps_its_weight() -> None:
    assert fold(trace(Normed(shared=True)), EVERY) == []


def test_counts_of_a_model() -> None:
    """Norms in front of q, k, v and of gate and up; the last is what the graph returns."""
    torch.manual_seed(0)
    model = Tiny("qkv")
    graph = trace(model)
    assert len(fold(graph, EVERY)) == 5 * LAYERS
    assert operation_counts(graph) == operation_counts(trace(model))
    assert operation_counts(merge(graph)) == operation_counts(merge(trace(Tiny("qkv"))))
    batch = packed(5, 3)
    torch.testing.assert_close(graph(batch), model(batch), rtol=1e-4, atol=1e-4)


def test_what_is_folded_follows_its_parameters() -> None:
    torch.manual_seed(0)
    for model, x, count in (
        (Chain(16, 32, 16, 16), torch.randn(3, 16), 2),
        (Stem(), torch.randn(1, 3, 16, 16), 3),
        (Normed(), torch.randn(3, 48), 2),
    ):
        graph = trace(model)
        found = fold(graph, EVERY)
        assert len(found) == count
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter) + 0.5)
        assert not torch.allclose(graph(x), model(x), rtol=1e-3)
        touched = {name for one in found for name in one.names}
        assert {name for name, _ in model.named_parameters()} <= touched | {"first.bias"}  # which is no copy
        for one in found:
            one.make()
        torch.testing.assert_close(graph(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norms_of_a_convolutional_stem(dtype: torch.dtype) -> None:
    """The stem in float64 beside the folded one, and with it how far each stage may have strayed at most."""
    torch.manual_seed(0)
    model, image = Stem().eval().to(dtype), torch.randn(2, 3, 32, 32).to(dtype)
    graph = folded(model)
    assert [operation_counts(trace(model))[name] for name in ("conv2d", "batch_norm")] == [3, 3]
    assert [operation_counts(graph)[name] for name in ("conv2d", "batch_norm")] == [3, 0]
    exact, most = image.double(), torch.zeros_like(image, dtype=torch.float64)
    for conv, norm in zip(model.convs, model.norms, strict=True):
        wide = [one.double() for one in (norm.running_mean, norm.running_var, norm.weight, norm.bias)]
        mean, variance, scale, shift = wide
        factor = scale / (variance + norm.eps).sqrt()
        weight = conv.weight.double() * factor[:, None, None, None]
        bias = ((0 if conv.bias is None else conv.bias.double()) - mean) * factor + shift
        how = (conv.stride, conv.padding, conv.dilation, conv.groups)
        spread = torch.finfo(dtype).eps + weight[0].numel() * 2.0**-24
        own = spread * F.conv2d(exact.abs() + most, weight.abs(), bias.abs(), *how)
        most = F.conv2d(most, weight.abs(), None, *how) + own
        given = None if conv.bias is None else conv.bias.double()
        exact = F.relu(F.batch_norm(F.conv2d(exact, conv.weight.double(), given, *how), *wide, eps=norm.eps))
    assert ((graph(image).double() - exact).abs() <= most).all()


def test_a_convolutions_cost_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1, groups=24))
    with torch.device("meta"):
        image = torch.empty(2, 24, 17, 16)
        (one,) = node_costs(trace(model.to("meta")), image, Workload((1,), (1,)))
    assert one.shape == (2, 48, 9, 8)
    assert one.cost.flops == 2 * 48 * 9 * 8 * (2 * 9 + 1)
    assert one.cost.written == 4 * 2 * 48 * 9 * 8
    assert one.cost.weights == 4 * (48 * 9 + 48)
