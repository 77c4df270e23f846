"""What passes rewrite graphs with: calls that count as part of a node's work, and nodes in the place of others."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, fx

from strata.graph.trace import must_stay


def meta_of(node: fx.Node, module: str | None = None) -> dict[str, Any]:
    """What a node carries that does some of another's work; under the name of `module`, if that is another."""
    return {"module": node.meta["module"] if module is None else module, "layer": node.meta["layer"]}


def joined(node: fx.Node, with_: fx.Node | str) -> str:
    """The name of a node that another is fused into: `post_attention_layernorm+add`."""
    last = with_ if isinstance(with_, str) else with_.meta["module"].rpartition(".")[2]
    return f"{node.meta['module']}+{last}"


def insert_before(
    place: fx.Node, target: Any, *arguments: Any, of: fx.Node | None = None, module: str | None = None
) -> fx.Node:
    """`target(*arguments)` in front of a node: a function, an operation or a method by its name. It is a part of `of`,
    or of that node (see `meta_of`)."""
    with place.graph.inserting_before(place):
        make = place.graph.call_method if isinstance(target, str) else place.graph.call_function
        made = make(target, arguments)
    made.meta = meta_of(place if of is None else of, module)
    return made


def insert_after(place: fx.Node, target: Any, *arguments: Any, of: fx.Node | None = None) -> fx.Node:
    """The same behind a node."""
    return insert_before(place.next, target, *arguments, of=place if of is None else of)


def value_of(graph: fx.GraphModule, node: fx.Node) -> Tensor:
    """What a node fetches."""
    value: Tensor = attrgetter(str(node.target))(graph)
    return value


def fetch(
    graph: fx.GraphModule, place: fx.Node, path: str, value: Tensor, like: fx.Node, names: Sequence[str]
) -> fx.Node:
    """What fetches, in front of `place`, a value that becomes a buffer at a path. It is a part of `like`, and stands
    for the parameters of these names."""
    owner, _, last = path.rpartition(".")
    graph.get_submodule(owner).register_buffer(last, value, persistent=False)
    with graph.graph.inserting_before(place):
        node = graph.graph.get_attr(path)
    node.meta = meta_of(like) | {"parameters": tuple(names)}
    return node


def follow(node: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    """`target(node, *arguments)`, which all readers of `node` read from now on."""
    after = insert_after(node, target, node, *arguments)
    node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)
    return after


def replace(node: fx.Node, by: fx.Node) -> fx.Node:
    """Whoever reads a node reads the other, and the node goes."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
    return by


def chain(node: fx.Node, *calls: tuple[Any, ...]) -> None:
    """In place of a node stand calls (an operation, and what it takes besides) one of what the other makes, of which
    the first takes what the node takes first."""
    last = node.args[0]
    for target, *arguments in calls:
        last = insert_before(node, target, last, *arguments)
    assert isinstance(last, fx.Node)
    replace(node, last)


def finished(graph: fx.GraphModule) -> fx.GraphModule:
    """Without what nobody reads any more."""
    graph.graph.eliminate_dead_code(is_impure_node=must_stay)
    graph.recompile()
    return graph
