"""A module becomes a graph of operations (torch.fx, Reed et al. 2022), the same for any number of tokens.

Every node carries `meta["module"]` (the path of the module it belongs to, by its parameter where it has one) and
`meta["layer"]` (the first number in that path, or None); nodes that fetch parameters carry `meta["parameters"]`, their
names in the checkpoint. In a bound graph (`strata.graph.bind`), `meta["bound"]` is the operation as it
was bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from strata.graph.deferred import DeferredGraph
from strata.kernels.op import Operation


def trace(model: nn.Module, method: str = "forward") -> fx.GraphModule:
    """Trace `method` of `model`, which takes one argument, into a graph module that is called with that argument.

    The parameters are shared with the model, not copied. Attributes of the argument (a Batch) become nodes, so they are
    read anew in every call. Raises ValueError if the model uses a tensor that is neither a parameter nor a buffer,
    because the graph would keep its value.
    """
    graph = _Tracer(method).trace(model)
    graph.eliminate_dead_code(is_impure_node=must_stay)
    for node in graph.nodes:
        _place(node)
    return DeferredGraph(model, graph, class_name=type(model).__name__)


def trace_head(model: nn.Module) -> fx.GraphModule:
    """Trace `model.head`: hidden [rows, hidden] to logits [rows, vocabulary]."""
    return trace(model, "head")


def operation_of(node: fx.Node) -> Operation | None:
    """The operation that a node calls, in a bound graph too; None for any other node."""
    bound = node.meta.get("bound")
    if bound is not None:
        return bound.operation  # type: ignore[no-any-return]
    return node.target if isinstance(node.target, Operation) else None


class _Tracer(fx.Tracer):
    """Looks parameters up by identity (torch's search is quadratic in their number) and fetches each value once."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.traced_func_name = method

    def trace(self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        assert isinstance(root, nn.Module)
        self._names = {id(tensor): name for name, tensor in root.named_buffers()}
        self._names |= {id(tensor): name for name, tensor in root.named_parameters()}
        self._fetched: dict[str, fx.Node] = {}
        self._attributes: dict[tuple[Any, ...], fx.Proxy] = {}
        return super().trace(root, concrete_args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val  # a parameter enters the graph where it is used, so its shape stays a constant

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, tuple) and hasattr(a, "_fields"):  # an argument with names, which torch would make a node of
            return type(a)(*map(self.create_arg, a))
        if not isinstance(a, Tensor):
            return super().create_arg(a)
        name = self._names.get(id(a))
        if name is None:
            raise ValueError(
                f"the model computes with a tensor of shape {list(a.shape)} that is neither a parameter nor a buffer; "
                "register it as a buffer"
            )
        if name not in self._fetched:
            node = self.create_node("get_attr", name, (), {})
            node.meta["parameters"] = (name,) if isinstance(a, nn.Parameter) else ()
            self._fetched[name] = node
        return self._fetched[name]

    def create_proxy(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: Any, *rest: Any, **more: Any) -> Any:
        if target is not getattr:
            return super().create_proxy(kind, target, args, kwargs, *rest, **more)
        key = (args[0].node, *args[1:])
        if key not in self._attributes:
            self._attributes[key] = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        return self._attributes[key]


def must_stay(node: fx.Node) -> bool:
    """Whether a node that nobody reads must stay: the argument, the output, and operations that write in place."""
    if node.op in ("placeholder", "output"):
        return True
    operation = operation_of(node)
    return operation is not None and bool(operation.mutates)


def reads_state(node: fx.Node) -> bool:
    """Whether a node reads what sequences have kept: the keys and values of their earlier tokens."""
    operation = operation_of(node)
    return operation is not None and operation.reads_state


def _place(node: fx.Node) -> None:
    parameters = node.meta.get("parameters") or [
        name for argument in node.all_input_nodes for name in argument.meta.get("parameters", ())
    ]
    if parameters:
        path = parameters[0].rpartition(".")[0]
    else:
        path = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
    node.type = None  # annotations are strings of another module's namespace
    node.meta["module"] = path
    node.meta["layer"] = next((int(part) for part in path.split(".") if part.isdecimal()), None)
