"""Operations that follow one another become one operation that does the same in one pass over memory.

A fused node's `meta["module"]` ends in what it was made of, joined by "+": `post_attention_layernorm+add`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from operator import getitem
from typing import Any

from torch import fx

from strata.graph.match import Call, Hole, Match, find, match
from strata.graph.passes import ALL_PASSES
from strata.graph.rewrite import finished, insert_after, insert_before, joined, replace
from strata.graph.trace import operation_of
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.attention.attention import attention
from strata.kernels.attention.decode import decode_attention
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.linear.linear import linear
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.norm.norm import add_rms_norm, rms_norm
from strata.kernels.op import Operation
from strata.kernels.rotary.rope import rope
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write


def fuse(graph: fx.GraphModule, passes: Collection[str] = ALL_PASSES) -> fx.GraphModule:
    """Fuse what can be fused, in place, in a merged graph that is not bound; returns `graph`.

    - A residual addition and the norm of the sum become `add_rms_norm`, across layers too.
    - Queries and keys of one product that are (normalized and) rotated, the keys written into pages with the values,
      become `qk_rope_kv_write`.

    passes: the names of those that run, `fuse_residual_norms` and `fuse_query_key_writes` among them or not.
    """
    for run in (fuse_residual_norms, fuse_query_key_writes):
        if run.__name__ in passes:
            run(graph)
    return finished(graph)


_SUM = Call(operator.add, (Hole("x"), Hole("residual")), "sum")
_NORM_OF_SUM = Call(rms_norm, (_SUM, Hole("weight"), Hole("eps")), "norm")


def fuse_residual_norms(graph: fx.GraphModule) -> None:
    """`rms_norm(x + residual)` becomes one node; others may read the sum too."""
    for found in find(graph, _NORM_OF_SUM):
        total, norm, weight = found["sum"], found["norm"], found["weight"]
        inputs = found["x"], found["residual"]
        if weight.op != "get_attr" or not all(isinstance(x, fx.Node) and x.op != "get_attr" for x in inputs):
            continue  # the weight may be fetched as early as the sum is made; a scalar or a bias is no residual
        total.prepend(weight)
        given = (*inputs, weight, found["eps"])
        _replace(insert_before(total, add_rms_norm, *given, of=norm, module=joined(norm, "add")), [total, norm])


def fuse_gated_products(graph: fx.GraphModule) -> fx.GraphModule:
    """`silu(gate) * up` of a merged product that nothing else reads becomes `linear_silu_mul`, in place.

    Apart from `fuse`, because it pays for many tokens only.
    """
    fuse_gating(graph, linear, linear_silu_mul, ("x", "weight", "bias"))
    return finished(graph)


def fuse_gating(graph: fx.GraphModule, product: Operation, gated: Operation, given: tuple[str, ...]) -> None:
    """`silu_mul` of the halves of a `product` becomes `gated` of the same arguments, called `given`.

    Only where nothing else reads the product or its halves. The product is left to the elimination of dead code.
    """
    whole = Call(product, tuple(Hole(name) for name in given), "product", read_once=True)
    halves = Call("split_with_sizes", (whole, Hole("sizes"), -1), "halves")
    gate, up = (Call(getitem, (halves, half), read_once=True) for half in range(2))
    for found in find(graph, Call(silu_mul, (gate, up), "gated")):
        sizes, old = found["sizes"], found["gated"]
        if len(found["halves"].users) != 2 or len(sizes) != 2 or sizes[0] != sizes[1]:
            continue
        name = joined(found["product"], "silu_mul")
        replace(old, insert_before(old, gated, *(found[name] for name in given), module=name))


def _heads(part: int) -> Call:
    """A part of the product of all three projections, seen as heads."""
    product = Call("split_with_sizes", (Hole("product"), Hole("sizes"), -1))
    return Call("unflatten", (Call(getitem, (product, part)), -1, (-1, Hole("head_dim"))))


def _rotated(name: str, part: int, *, normed: bool) -> Call:
    heads = _heads(part)
    if normed:
        heads = Call(rms_norm, (heads, Hole(f"{name}_weight"), Hole("eps")), f"{name}_norm", read_once=True)
    return Call(rope, (heads, Hole("cos"), Hole("sin")), name, read_once=name == "k")


def fuse_query_key_writes(graph: fx.GraphModule) -> None:
    """The keys that are written lead to their product, where the queries are, which nothing may read before that."""
    for normed in (False, True):
        query = _rotated("q", 0, normed=normed)
        queries = {found["product"]: found["q"] for found in find(graph, query)}
        keys_and_values = (_rotated("k", 1, normed=normed), _heads(2), Hole("pages"), Hole("layer"))
        for written in find(graph, Call(kv_write, keys_and_values, "kv_write")):
            q = queries.get(written["product"])
            found = match(query, q, written) if q is not None else None
            if found is not None and _is_whole(found) and all(found["kv_write"] < user for user in found["q"].users):
                _fuse_query_key_write(found)


def _is_whole(found: Match) -> bool:
    """Whether the product holds the three parts that `qk_rope_kv_write` expects and nothing else."""
    sizes, head_dim = found["sizes"], found["head_dim"]
    return len(sizes) == 3 and sizes[1] == sizes[2] and all(size % head_dim == 0 for size in sizes)


def _fuse_query_key_write(found: Match) -> None:
    write, sizes, head_dim = found["kv_write"], found["sizes"], found["head_dim"]
    norms = [found[name] for name in ("q_norm", "k_norm") if name in found]
    given = [found.get(name) for name in ("product", "q_weight", "k_weight", "cos", "sin", "pages")]
    heads = HeadsSpec(found["layer"], sizes[0] // head_dim, sizes[1] // head_dim, found.get("eps", 0.0))
    parts = "+".join([*(norm.meta["module"].rpartition(".")[2] for norm in norms), "rope", "kv_write"])
    path = ".".join(filter(None, (write.meta["module"], parts)))
    k, v = (_item(write, index) for index in range(2))
    _replace(insert_before(write, qk_rope_kv_write, *given, heads, module=path), [found["q"], k, v])
    write.graph.erase_node(write)


def _item(node: fx.Node, index: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is getitem and user.args[1] == index), None)


def _replace(fused: fx.Node, originals: list[Any]) -> None:
    """Let the results of `fused` take the place of `originals`, which go; None is a result that nobody reads."""
    place = fused
    for index, original in enumerate(originals):
        if original is None:
            continue
        place = replace(original, insert_after(place, getitem, fused, index, of=original))


_GIVEN = ("product", "q_weight", "k_weight", "cos", "sin")
_PAGES = Call(getattr, (Hole("batch"), "pages"), "pages")
_WRITTEN = Call(qk_rope_kv_write, (*(Hole(name) for name in _GIVEN), _PAGES, Hole("heads")), "written")
_RESULTS = tuple(Call(getitem, (_WRITTEN, index), name, read_once=True) for index, name in enumerate("qkv"))
_ATTENTION, _WITH_SINKS = (
    Call(attention, (*_RESULTS, Hole("batch"), Hole("spec"), *sinks), "attention") for sinks in ((), (Hole("sinks"),))
)
_TAKEN = (*_GIVEN, "batch", "heads", "spec", "sinks")


def fuse_decode_attention(graph: fx.GraphModule) -> fx.GraphModule:
    """`qk_rope_kv_write` and the `attention` to its results become `decode_attention`, in place; returns `graph`.

    For a graph of decode steps that `fuse` has gone over and that is not bound yet. It then serves only batches in
    which every sequence has one new token, in pages.
    """
    for found in (*find(graph, _ATTENTION), *find(graph, _WITH_SINKS)):
        same_layer = found["heads"].layer == found["spec"].layer
        if same_layer and len(found["written"].users) == len(_RESULTS) and not _pages_read_between(found):
            old, written, given = (
                found["attention"],
                found["written"],
                (found[name] for name in _TAKEN if name in found),
            )
            replace(old, insert_before(old, decode_attention, *given, of=written, module=joined(written, "attention")))
            for node in (*(found[name] for name in "qkv"), written):
                graph.graph.erase_node(node)
    return finished(graph)


def _pages_read_between(found: Match) -> bool:
    """Whether something has to find the new keys in the pages before attention: they will be written only by then."""
    users = {*found["pages"].users, *(user for user in found["batch"].users if operation_of(user) is not None)}
    return any(found["written"] < user < found["attention"] for user in users)
