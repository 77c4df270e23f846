"""The registry: an operation is a name, a reference, a cost, and the implementations that compete to run it.

Model code calls an operation like a function. While `torch.fx` traces, the call becomes one node of the graph;
otherwise the first implementation that fits the device and the arguments runs. The engine binds the nodes of its graph
once (`Operation.bind`), which is where deterministic mode chooses the kernels whose bits do not depend on the batch.

An operation with more than a few arguments names them once, in a NamedTuple: its operands. All functions about it (the
reference, cost, meta, and of implementations what runs, supports, tells kernels and scratch) take that value, whoever
calls it gives the arguments one after the other. An operation with few has functions that take these themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from strata.hardware.roofline import Cost, Workload
from strata.kernels.choose import first_fitting
from strata.kernels.device_limits import implementations_for
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.triton_import import HAS_TRITON

# Instead of the names of a library's kernels, which are for it to choose; one may stand for several in a row.
ATEN, CUBLAS, CUDNN, NCCL = "(ATen)", "(cuBLAS)", "(cuDNN)", "(NCCL)"
Kernels = tuple[Any, ...] | Callable[..., tuple[Any, ...]]  # a kernel of Triton, or the name of a library


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation on one kind of device.

    `invariant`: a row of the result has the same bits whatever the other rows are and however many there are.
    `differentiable`: autograd passes through it.
    `supports`: whether it can run these arguments; None means always.
    `packed`: it takes packed weights, and no others.
    `kernels`: what it launches on CUDA, in order: Triton kernels and libraries; or a function of the arguments that
    tells. `scratch`: a function of them that tells how many bytes it holds while it runs, beside them and its result;
    None: none. `supports` and such functions are also asked with arguments that are `as_if_on` a device.
    """

    name: str
    run: Callable[..., Any]
    device: str
    invariant: bool = False
    differentiable: bool = False
    supports: Callable[..., bool] | None = None
    kernels: Kernels = (ATEN,)
    packed: bool = False
    scratch: Callable[..., int] | None = None

    def launches(self, *given: Any) -> tuple[str, ...]:
        """The names of the kernels that a call makes it launch, as a profiler shows them, or of libraries. given: what
        `Operation.call_args` makes of its arguments."""
        kernels = self.kernels if isinstance(self.kernels, tuple) else self.kernels(*given)
        return tuple(kernel if isinstance(kernel, str) else kernel.__name__ for kernel in kernels)


@dataclass(eq=False)
class Operation:
    """A named operation, with the traits by which passes over graphs know it.

    mutates: names of the arguments that it writes in place (the KV pools).
    rowwise: a row of each result follows from the same row of every activation alone.
    product: the first argument, activations, is multiplied by the second, a weight [out, width]; the third is a bias
        [out] or None. gated: of that product the first half of the columns gates the second.
    dense: a product with one weight [out, width], wherever that stands among the arguments; every `product` is.
    mixture: each token is multiplied by experts of its own, whose weights are those of all, [experts, out, width].
    packable: the places of arguments that are weights and may be packed ones.
    reads_state: a token's result follows from what its sequence has kept (the keys and values before it), so the work
        depends on how long the sequences are. recurrent: what they keep is a state whose size does not. attends: each
        query is multiplied with all keys of its sequence that it sees.
    fusible: products of few rows take it up, a norm or a gating beside them. tuned_as: the operation whose tuned
        kernels its product runs, "" its own.
    collective: all ranks of an axis run it together; its second argument is the axis.
    backward: the cost of its gradients, where that does not follow from its own by the rule of `backward_cost`.
    parts: of a fused operation, a function of `run` and the operands that calls `run(operation, *arguments)` for each
        of those that it replaces, one after another.
    operands: the NamedTuple of its arguments, which `definition`, `parts` and implementations take; None: they take the
        arguments. definition: the reference; `reference`, `cost`, `meta` and `backward` take the arguments themselves.
    """

    name: str
    definition: Callable[..., Any]
    cost: Callable[..., Cost]
    meta: Callable[..., Any]
    mutates: tuple[str, ...] = ()
    rowwise: bool = False
    product: bool = False
    gated: bool = False
    packable: tuple[int, ...] = ()
    reads_state: bool = False
    collective: bool = False
    backward: Callable[..., Cost] | None = None
    dense: bool = False
    mixture: bool = False
    recurrent: bool = False
    attends: bool = False
    fusible: bool = False
    tuned_as: str = ""
    parts: Callable[..., Any] | None = None
    operands: Callable[..., Any] | None = None
    reference: Callable[..., Any] = field(init=False)
    implementations: list[Implementation] = field(default_factory=list)
    _bound: dict[tuple[str, bool, bool, bool], Bound] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.reference, self.cost, self.meta = map(self.of_arguments, (self.definition, self.cost, self.meta))
        self.dense |= self.product
        self.backward = None if self.backward is None else self.of_arguments(self.backward)

    @property
    def __name__(self) -> str:  # torch.fx names nodes after it
        return self.name

    def call_args(self, *args: Any) -> tuple[Any, ...]:
        """What the functions of its implementations are called with: its operands as one value, or the arguments."""
        return args if self.operands is None else (self.operands(*args),)

    def of_arguments(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same of a call's arguments."""
        operands = self.operands
        if operands is None:
            return function

        @wraps(function)
        def run(*args: Any, **more: Any) -> Any:
            return function(operands(*args), **more)

        return run

    def backward_cost(self, *args: Any, workload: Workload) -> Cost:
        """The cost of the gradients of all that a call reads.

        By the rule twice the FLOPs, as a product has two gradients (Kaplan et al. 2020, section 2.1); it reads what the
        call read and the gradient of what that wrote, writes a gradient of all that was read, and as many messages
        travel back. What kernels compute again, as attention its scores, does not count.
        """
        if self.backward is not None:
            return self.backward(*args, workload=workload)
        cost = self.cost(*args, workload=workload)
        return Cost(
            2 * cost.flops,
            read=cost.read + cost.written,
            written=cost.read,
            weights=cost.weights,
            messages=cost.messages,
            sent=cost.sent,
        )

    def implement(self, name: str, *devices: str, **what: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function for kinds of devices; among those that fit, the one registered first is
        preferred. what: see `Implementation`."""

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations += [Implementation(name, run, device, **what) for device in devices]
            return run

        return register

    def by_definition(self, *devices: str, name: str = "torch", **what: Any) -> None:
        """Register the reference as an implementation."""
        self.implement(name, *devices, **what)(self.definition)

    def unfused(self, name: str, device: str, **what: Any) -> Callable[..., Any]:
        """Register a fused operation's parts, one after another, and return what runs them; what they launch follows
        from theirs."""
        composition = self.parts
        assert composition is not None

        def run_part(part: Operation, *args: Any) -> Any:
            return part.bind(device, packed=has_quantized(args))(*args)

        def kernels(*given: Any) -> tuple[str, ...]:
            found: list[str] = []

            def note(part: Operation, *args: Any) -> Any:
                found.extend(part.bind(device, packed=has_quantized(args)).launches(*args))
                return part.meta(*args)

            composition(note, *given)
            return tuple(found)

        told: dict[str, Any] = {"kernels": kernels} if device == "cuda" else {}
        return self.implement(name, device, **told, **what)(partial(composition, run_part))

    def in_triton(self, run: Callable[..., Any], name: str = "triton", **what: Any) -> None:
        """Register what launches kernels of Triton on CUDA, where that is installed."""
        if HAS_TRITON:
            self.implement(name, "cuda", **what)(run)

    def bind(
        self, device: str, *, deterministic: bool = False, differentiable: bool = False, packed: bool = False
    ) -> Bound:
        """The operation for one kind of device ("cpu", "cuda", "meta"), as a callable that keeps its name.

        "reference" leaves the reference alone, which runs anywhere. packed: for calls with a packed weight.
        """
        key = (device, deterministic, differentiable, packed)
        if key not in self._bound:
            self._bound[key] = Bound(self, tuple(self._candidates(device, deterministic, differentiable, packed)))
        return self._bound[key]

    def _candidates(
        self, device: str, deterministic: bool, differentiable: bool, packed: bool
    ) -> Iterator[Implementation]:
        if device == "meta":
            yield Implementation("meta", self.meta if self.operands is None else lambda call: self.meta(*call), "meta")
            return
        for implementation in self.implementations:
            if (
                implementation.device == device
                and implementation.packed == packed
                and implementation.invariant >= deterministic
                and implementation.differentiable >= differentiable
            ):
                yield implementation
        if deterministic:
            return
        if differentiable and self.parts is not None:
            # The parts may have gradients of their own where the whole has none; the reference's keep floats.
            parts = partial(self.parts, lambda part, *args: part(*args))
            yield Implementation("parts", parts, device, differentiable=True)
        else:
            yield Implementation("reference", self.definition, device, differentiable=True)

    def __call__(self, *args: Any) -> Any:
        first, packed, differentiable, records = None, False, False, torch.is_grad_enabled()
        for argument in args:
            if isinstance(argument, Tensor):
                first = argument if first is None else first
                differentiable = differentiable or (records and argument.requires_grad)
            elif isinstance(argument, QuantizedWeight):
                packed = True
            elif isinstance(argument, Proxy):
                return argument.tracer.create_proxy("call_function", self, args, {})
        assert first is not None
        kind = first.device.type if differentiable else implementations_for(first.device)
        return self.bind(kind, differentiable=differentiable, packed=packed)(*args)


@dataclass(frozen=True, eq=False)
class Bound:
    """An operation with its candidates for one device, in order of preference."""

    operation: Operation
    candidates: tuple[Implementation, ...]

    _ways: tuple[tuple[Callable[..., bool] | None, Implementation], ...] = field(init=False)
    _count: int | None = field(init=False)
    _make: Callable[[tuple[Any, ...]], Any] = field(init=False)

    def __post_init__(self) -> None:
        operands: Any = self.operation.operands
        object.__setattr__(self, "_ways", tuple((one.supports, one) for one in self.candidates))
        # Of all operands, a NamedTuple's own constructor would take twice as long to make the same, in every launch.
        object.__setattr__(self, "_count", None if operands is None else len(operands._fields))
        object.__setattr__(self, "_make", partial(tuple.__new__, operands))

    @property
    def __name__(self) -> str:
        return self.operation.name

    def choose(self, *args: Any) -> Implementation:
        """The implementation that runs these arguments. Raises NotImplementedError if none can."""
        return self._fitting(self.operation.call_args(*args))

    def _fitting(self, given: tuple[Any, ...]) -> Implementation:
        found = first_fitting(self._ways, given)
        if found is None:
            names = ", ".join(candidate.name for candidate in self.candidates) or "none registered"
            raise NotImplementedError(
                f"no implementation of {self.operation.name} fits these arguments (tried: {names})"
            )
        return found

    def launches(self, *args: Any) -> tuple[str, ...]:
        """The kernels that these arguments launch; see `Implementation.launches`."""
        given = self.operation.call_args(*args)
        return self._fitting(given).launches(*given)

    def scratch(self, *args: Any) -> int:
        """Bytes that these arguments make it hold while it runs; see `Implementation.scratch`."""
        given = self.operation.call_args(*args)
        tell = self._fitting(given).scratch
        return 0 if tell is None else tell(*given)

    def __call__(self, *args: Any) -> Any:
        given = args
        if self._count is not None:
            given = (self._make(args),) if len(args) == self._count else self.operation.call_args(*args)
        return (first_fitting(self._ways, given) or self._fitting(given)).run(*given)


def has_quantized(arguments: Iterable[Any]) -> bool:
    """Whether a weight among the arguments of a call is packed."""
    return any(isinstance(argument, QuantizedWeight) for argument in arguments)


OPERATIONS: dict[str, Operation] = {}


def like_first(first: Any, *others: Any) -> Tensor:
    """The meta of an operation whose result has the shape and dtype of its first argument, or operand."""
    like: Tensor = first if isinstance(first, Tensor) else first[0]
    return like.new_empty(like.shape, device="meta")


def elementwise(flops: int) -> Callable[..., Cost]:
    """The cost of an operation with so many FLOPs an element of its first argument, like which its result is."""

    def cost(first: Tensor, *others: Any, workload: Workload) -> Cost:
        read = sum(one.nbytes for one in (first, *others) if isinstance(one, Tensor))
        return Cost(flops * first.numel(), read, first.nbytes)

    return cost


def operation(
    cost: Callable[..., Cost], *, meta: Callable[..., Any] = like_first, **traits: Any
) -> Callable[[Callable[..., Any]], Operation]:
    """Make the decorated reference an operation of the same name and list it in `OPERATIONS`.

    `meta(call)` returns empty tensors of the result's shape and dtype on the meta device; `cost(call, workload)` counts
    the work (see `strata.hardware.roofline`), `workload` telling what the lengths in tensors cannot tell there. Without
    `operands`, they and the reference take the arguments in the place of `call`. traits: see `Operation`.
    """

    def define(reference: Callable[..., Any]) -> Operation:
        if reference.__name__ in OPERATIONS:
            raise ValueError(f"operation {reference.__name__!r} is defined twice")
        made = Operation(reference.__name__, reference, cost, meta, **traits)
        made.__doc__ = reference.__doc__
        OPERATIONS[made.name] = made
        return made

    return define
