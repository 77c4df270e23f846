"""What a weight alone decides is computed once: linear after linear, batch norm after convolution, norm weight before
products. For inference.

A folded weight is computed in float64 and rounded once, so it equals what it stands for in real numbers alone. Let u be
the unit roundoff of its dtype, W, b the folded weight and bias, and k the products that one element of the result adds
up: that element lies within `(2 u + k 2^-24) (|W| |x| + |b|)` of the exact one, where sums are float32 ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from strata.graph.match import Call, Hole, find
from strata.graph.passes import ALL_PASSES
from strata.graph.rewrite import fetch, finished, insert_before, replace, value_of
from strata.graph.trace import operation_of
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm


class Folded(NamedTuple):
    """A weight that was computed from parameters, whose names these are. make: computes it anew, in place."""

    names: frozenset[str]
    make: Callable[[], object]


def fold(graph: fx.GraphModule, passes: Collection[str] = ALL_PASSES) -> list[Folded]:
    """Run those of `fold_batch_norms`, `fold_linears` and `fold_norm_weights` that are among `passes`, in place.

    graph: traced, and not merged yet; weights that are packed already stay. Folded weights are buffers beside the
    parameters, which stay as they are: whoever changes one calls `make` of all that name it, in this order.
    """
    found: list[Folded] = []
    for run in (fold_batch_norms, fold_linears, fold_norm_weights):
        if run.__name__ in passes:
            found += run(graph)
    if found:
        finished(graph)
    return found


def fold_linears(graph: fx.GraphModule) -> Iterator[Folded]:
    """`linear(linear(x))` becomes one, where nothing else reads between and one weight is no larger than both."""
    for outer in graph.graph.find_nodes(op="call_function", target=linear):
        inner = outer.args[0]
        if inner.target is not linear or len(inner.users) > 1 or not (_plain(inner) and _plain(outer)):
            continue
        (x, *first), (_, *second) = inner.args, outer.args
        a, b = (value_of(graph, weights[0]) for weights in (first, second))
        if b.shape[0] * a.shape[1] > a.numel() + b.numel():
            continue
        yield from _fold(graph, outer, x, [*first, None][:2], [*second, None][:2], _product)


def _product(a: Tensor, a_bias: Tensor | None, b: Tensor, b_bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    biases = [one for one in (None if a_bias is None else b @ a_bias, b_bias) if one is not None]
    return b @ a, sum(biases[1:], biases[0]) if biases else None


def fold_batch_norms(graph: fx.GraphModule) -> Iterator[Folded]:
    """`batch_norm(conv2d(x))` by running statistics becomes one convolution, where nothing else reads between."""
    for norm in graph.graph.find_nodes(op="call_function", target=F.batch_norm):
        conv, *statistics = norm.args
        given = norm.kwargs
        if conv.target is not torch.conv2d or len(conv.users) > 1 or given.get("training") or not _plain(conv):
            continue
        x, *weights = conv.args[:3]
        eps = given["eps"]

        def folded(weight: Tensor, bias: Tensor | None, *of_norm: Tensor | None, eps: float = eps) -> Any:
            mean, variance, scale, shift = of_norm
            assert mean is not None
            assert variance is not None
            factor = torch.rsqrt(variance + eps) * (1 if scale is None else scale)
            moved = ((0 if bias is None else bias) - mean) * factor + (0 if shift is None else shift)
            return weight * factor[:, None, None, None], moved

        sources = [*statistics, given.get("weight"), given.get("bias")]
        yield from _fold(graph, norm, x, [*weights, None][:2], sources, folded, conv)


def fold_norm_weights(graph: fx.GraphModule) -> Iterator[Folded]:
    """The weight of an `rms_norm` that products alone read goes into theirs; ones take its place, the same for all."""
    ones: dict[tuple[Any, ...], Tensor] = {}
    for found in find(graph, Call(rms_norm, (Hole("x"), Hole("weight"), Hole("eps")), "norm")):
        norm, weight = found["norm"], found["weight"]
        readers = list(norm.users)
        if not (readers and weight.op == "get_attr" and all(_multiplies(reader, norm) for reader in readers)):
            continue
        for reader in readers:
            sources = [reader.args[1], None, weight]
            yield from _fold(graph, reader, norm, sources[:2], sources[2:], lambda b, _, scale: (b * scale, None))
        value = value_of(graph, weight)
        one = ones.setdefault((value.shape, value.dtype, value.device), torch.ones_like(value))
        norm.update_arg(1, _fetch(graph, norm, weight, one, weight.meta["parameters"]))


def _multiplies(node: fx.Node, x: fx.Node) -> bool:
    operation = operation_of(node)
    return operation is not None and operation.product and _plain(node) and node.all_input_nodes.count(x) == 1


def _plain(node: fx.Node) -> bool:
    """Whether the weight of a product or convolution is fetched, and not packed; with its bias."""
    return all(isinstance(one, fx.Node) and one.op == "get_attr" for one in node.args[1:3] if one is not None)


def _fold(
    graph: fx.GraphModule,
    node: fx.Node,
    x: fx.Node,
    own: Sequence[fx.Node | None],
    others: Sequence[fx.Node | None],
    compute: Callable[..., tuple[Tensor, Tensor | None]],
    call: fx.Node | None = None,
) -> Iterator[Folded]:
    """`node` becomes `call` (itself, if not given) of `x` and what `compute` makes of all weights in float64.

    own: weight and bias, whose dtype, place and names those have; a bias that is not computed stays as it is.
    """
    call = call or node
    sources = [*own, *others]
    values = [None if one is None else value_of(graph, one) for one in sources]
    like = values[0]
    assert like is not None

    def computed() -> list[Tensor]:
        wide = compute(*(None if one is None else one.detach().double() for one in values))
        return [one.to(like.dtype).contiguous() for one in wide if one is not None]

    results = computed()

    def make() -> None:
        for result, value in zip(results, computed(), strict=True):
            result.copy_(value)

    names = frozenset(name for one in sources if one is not None for name in _names(one))
    weight, bias = own
    assert weight is not None
    fetched = []
    for beside, result in zip((weight, bias or weight), results, strict=False):
        fetched.append(_fetch(graph, node, beside, result, weight.meta["parameters"]))
        fetched[-1].meta["folded"] = names
    replace(node, insert_before(node, call.target, x, *fetched, *call.args[1 + len(fetched) :], of=call))
    yield Folded(names, make)


def _names(node: fx.Node) -> Collection[str]:
    """Of what a fetched weight was computed from; its own, if it was not."""
    found: Collection[str] = node.meta.get("folded") or node.meta["parameters"] or (str(node.target),)
    return found


def _fetch(graph: fx.GraphModule, before: fx.Node, like: fx.Node, value: Tensor, names: Sequence[str]) -> fx.Node:
    """A node that fetches a buffer beside the parameter that another fetches."""
    owner, _, last = str(like.target).rpartition(".")
    holder, name = graph.get_submodule(owner), f"{last}_folded"
    while hasattr(holder, name):
        name += "_"
    return fetch(graph, before, ".".join(filter(None, (owner, name))), value, like, names)
