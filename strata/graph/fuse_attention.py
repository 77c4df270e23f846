"""In graphs of decode steps, attention takes up what leads from the product of the projections to it."""

from __future__ import annotations

from operator import getitem

from torch import fx

from strata.graph.capture import must_stay, operation_of
from strata.graph.match import Call, Hole, Match, find
from strata.kernels.attention.attention import attention
from strata.kernels.attention.decode import decode_attention
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write

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

    For a graph that `fuse` has gone over and that is not bound yet. It then serves only batches in which every sequence
    has one new token, in pages.
    """
    for found in (*find(graph, _ATTENTION), *find(graph, _WITH_SINKS)):
        same_layer = found["heads"].layer == found["spec"].layer
        if same_layer and len(found["written"].users) == len(_RESULTS) and not _pages_read_between(found):
            _fuse(graph.graph, found)
    graph.graph.eliminate_dead_code(is_impure_node=must_stay)
    graph.recompile()
    return graph


def _pages_read_between(found: Match) -> bool:
    """Whether something has to find the new keys in the pages before attention: they will be written only by then."""
    users = {*found["pages"].users, *(user for user in found["batch"].users if operation_of(user) is not None)}
    return any(found["written"] < user < found["attention"] for user in users)


def _fuse(graph: fx.Graph, found: Match) -> None:
    old, written = found["attention"], found["written"]
    with graph.inserting_before(old):
        fused = graph.call_function(decode_attention, tuple(found[name] for name in _TAKEN if name in found))
    fused.meta = {"module": f"{written.meta['module']}+attention", "layer": written.meta["layer"]}
    old.replace_all_uses_with(fused)
    for node in (old, *(found[name] for name in "qkv"), written):
        graph.erase_node(node)
