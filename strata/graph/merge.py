"""Linear layers that read the same input become one product over one weight (q/k/v, gate/up).

The merged weight is the only storage: the original parameters become views of it, so a write into `q_proj.weight`
reaches the merged product without a copy, and the module itself still runs. Moving the module to another device or
assigning new parameters afterwards breaks that tie; trace and merge again then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, starmap
from operator import getitem

import torch
from torch import Tensor, fx

from strata.graph.rewrite import insert_after, insert_before, meta_of, replace, value_of
from strata.kernels.fused import storage_of
from strata.kernels.linear.linear import linear
from strata.kernels.quant.quantized import QuantizedWeight, shared_input_scale


def merge(graph: fx.GraphModule) -> fx.GraphModule:
    """Merge, in place, the linears of one module that read the same input; returns `graph`.

    A linear takes part if its weight (and bias) are parameters that nothing else in the graph uses and that share no
    storage with another parameter, unless it is that of many, where those of a group that lie side by side are merged:
    whoever owns it writes there. Packed weights are merged with those of their scheme, scales beside scales. All
    linears of a group have a bias or none has. The results of the merged product are views of it, [..., out of each]
    with the token stride of the whole. For inference: gradients do not reach the parameters. Memory: a copy of one
    group at a time.
    """
    aliased = _aliased(graph)
    groups: dict[object, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.target is linear and _mergeable(graph, node, aliased):
            x, weight, bias = _arguments(node)
            parent = node.meta["module"].rpartition(".")[0]
            groups[x, parent, *_kind(graph, weight), bias is None].append(node)
    for group in groups.values():
        for run in _where_they_lie(graph, group):
            if len(run) > 1:
                _merge_group(graph, run)
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")
    graph.recompile()
    return graph


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node | QuantizedWeight, fx.Node | None]:
    x, weight, *rest = node.args
    bias = rest[0] if rest else None
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node | QuantizedWeight)
    assert bias is None or isinstance(bias, fx.Node)
    return x, weight, bias


def _parts(node: fx.Node) -> list[fx.Node]:
    """What fetches the tensors of a product's weight that have rows, and its bias."""
    _, weight, bias = _arguments(node)
    own = [weight] if isinstance(weight, fx.Node) else list(_with_rows(weight).values())
    return own if bias is None else [*own, bias]


def _with_rows(weight: QuantizedWeight) -> dict[str, fx.Node]:
    """Of a packed weight in a graph: what fetches its tensors, by field, but for the order of its columns."""
    return {name: one for name, one in weight._asdict().items() if isinstance(one, fx.Node) and name != "order"}


def _kind(graph: fx.GraphModule, weight: fx.Node | QuantizedWeight) -> tuple[object, ...]:
    """What weights have in common that can be merged."""
    if isinstance(weight, fx.Node):
        tensor = value_of(graph, weight)
        return tensor.shape[1], tensor.dtype, tensor.device
    tensors = {name: value_of(graph, one) for name, one in _with_rows(weight).items()}
    order = value_of(graph, weight.order) if isinstance(weight.order, fx.Node) else None
    columns = None if order is None or order.is_meta else tuple(order.tolist())
    static = weight.input_scale is not None
    return (
        weight.scheme,
        static,
        columns,
        *((name, one.shape[1], one.dtype, one.device) for name, one in tensors.items()),
    )


def _mergeable(graph: fx.GraphModule, node: fx.Node, aliased: set[str]) -> bool:
    _, weight, _ = _arguments(node)
    if isinstance(weight, QuantizedWeight) and weight.rows != 1 and not _has_whole_blocks(graph, weight):
        return False
    return all(
        used.op == "get_attr"
        and len(used.meta["parameters"]) <= 1
        and len(used.users) == 1
        and used.target not in aliased
        and value_of(graph, used).is_contiguous()
        and (isinstance(weight, QuantizedWeight) or len(used.meta["parameters"]) == 1)
        for used in _parts(node)
    )


def _has_whole_blocks(graph: fx.GraphModule, weight: QuantizedWeight) -> bool:
    """Whether no block of rows with one scale is cut off at the end, so that other rows can follow."""
    values = weight.values
    assert isinstance(values, fx.Node)
    return weight.rows > 0 and value_of(graph, values).shape[0] % weight.rows == 0


def _aliased(graph: fx.GraphModule) -> set[str]:
    """Names of parameters that begin at the same place of the same storage as another (tied through views)."""
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, parameter in graph.named_parameters():
        names[storage_of(parameter), int(parameter.storage_offset())].append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


def _where_they_lie(graph: fx.GraphModule, group: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """A group as it can be merged: whole, or, if parameters of it lie in one storage, those that lie side by side."""
    tensors = [[value_of(graph, one) for one in _parts(node)] for node in group]
    if len({storage_of(weight) for weight, *_ in tensors}) == len(group):
        return [list(group)]
    runs = [[group[0]]]
    for node, before, after in zip(group[1:], tensors, tensors[1:], strict=False):
        if all(starmap(_follows, zip(before, after, strict=True))):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _follows(before: Tensor, after: Tensor) -> bool:
    """Whether a tensor begins where another ends."""
    end = storage_of(before), before.storage_offset() + before.numel()
    return (storage_of(after), after.storage_offset()) == end


def _merge_group(graph: fx.GraphModule, group: Sequence[fx.Node]) -> None:
    inputs = [_arguments(node) for node in group]
    sizes = [value_of(graph, _parts(node)[0]).shape[0] for node in group]
    parent, _, _ = group[0].meta["module"].rpartition(".")
    parts = [node.meta["module"].rpartition(".")[2] for node in group]
    meta = meta_of(group[0], ".".join(filter(None, (parent, "&".join(parts)))))
    with graph.graph.inserting_before(group[0]):
        weight = _merged_weight(graph, [weight for _, weight, _ in inputs], meta)
        biases = [bias for _, _, bias in inputs if bias is not None]
        bias = _merged(graph, biases, meta) if biases else None
    product = insert_before(group[0], linear, inputs[0][0], weight, bias, module=meta["module"])
    place = insert_after(product, "split_with_sizes", product, sizes, -1)
    pieces = place
    for index, node in enumerate(group):
        place = replace(node, insert_after(place, getitem, pieces, index, of=node))


def _merged_weight(
    graph: fx.GraphModule, weights: Sequence[fx.Node | QuantizedWeight], meta: dict[str, object]
) -> fx.Node | QuantizedWeight:
    """What fetches the rows of all weights as one."""
    plain = [weight for weight in weights if isinstance(weight, fx.Node)]
    if plain:
        return _merged(graph, plain, meta)
    packed = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    fields = [_with_rows(weight) for weight in packed]
    merged = {name: _merged(graph, [field[name] for field in fields], meta) for name in fields[0]}
    return packed[0].with_tensors(merged)._replace(input_scale=shared_input_scale(packed))


def _merged(graph: fx.GraphModule, nodes: Sequence[fx.Node], meta: dict[str, object]) -> fx.Node:
    """A node that fetches the rows of all `nodes` as one tensor, kept in a buffer beside the parameters."""
    names = [str(node.target) for node in nodes]
    whole = _join([value_of(graph, node) for node in nodes])
    paths = [name.split(".") for name in names]
    holder = graph.get_submodule(".".join(paths[0][:-2]))
    name = "_".join(path[-2] for path in paths) + "_" + paths[0][-1]
    while hasattr(holder, name) and not _same(getattr(holder, name), whole):
        name += "_"  # of another group, or the module's own
    holder.register_buffer(name, whole, persistent=False)
    node = graph.graph.get_attr(".".join([*paths[0][:-2], name]))
    node.meta = meta | {"parameters": tuple(one for node in nodes for one in node.meta["parameters"])}
    return node


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of all tensors in one, of which they are views from now on (as they may be already)."""
    first = tensors[0]
    rows = sum(tensor.shape[0] for tensor in tensors)
    if all(starmap(_follows, pairwise(tensors))):
        return first.data.as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.empty((rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
    start = 0
    for tensor in tensors:
        view = whole[start : start + tensor.shape[0]]
        view.copy_(tensor.data)
        tensor.data = view
        start += tensor.shape[0]
    return whole


def _same(existing: object, whole: Tensor) -> bool:
    """Whether a module's attribute is the same memory: graphs of one model merge the same parameters."""
    return (
        isinstance(existing, Tensor)
        and existing.shape == whole.shape
        and (storage_of(existing), existing.storage_offset()) == (storage_of(whole), whole.storage_offset())
    )
