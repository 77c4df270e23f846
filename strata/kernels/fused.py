"""A fused operation out of those that it replaces: its reference, its results' shapes, its cost and, where it has none
of its own, its gradients follow from theirs.

What they are is said once, by a function of `run` and the arguments that calls `run(operation, *arguments)` for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import Operation, operation
from strata.kernels.quant.quantized import QuantizedWeight

Run = Callable[..., Any]
Composition = Callable[..., Any]


def fused(
    *, saved: Callable[..., Cost] | None = None, operands: Callable[..., Any] | None = None, **traits: Any
) -> Callable[[Composition], Operation]:
    """Make a composition `name(run, *arguments)` the fused operation `name(*arguments)`, as `operation` does.

    Its cost is that of all parts, less what these write for one another and read of it. saved: of the arguments, what
    it does not do besides (`Cost`). operands: composition and `saved` take them in the place of the arguments. traits:
    see `Operation`.
    """

    def on_meta(given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(_on_meta, given)) if operands is None else (operands(*map(_on_meta, given[0])),)

    def define(composition: Composition) -> Operation:
        def reference(*given: Any) -> Any:
            return composition(lambda part, *args: part.reference(*args), *given)

        def meta(*given: Any) -> Any:
            return composition(lambda part, *args: part.meta(*args), *on_meta(given))

        def cost(*given: Any, workload: Workload) -> Cost:
            given = on_meta(given)
            found = _Costs(workload)
            whole = found.without_intermediates(composition(found, *given))
            return whole if saved is None else whole - saved(*given)

        reference.__name__, reference.__doc__ = composition.__name__, composition.__doc__
        defined = operation(cost, meta=meta, operands=operands, **traits)(reference)
        defined.parts = composition
        return defined

    return define


def _on_meta(argument: Any) -> Any:
    return argument.to("meta") if isinstance(argument, Tensor | QuantizedWeight) else argument


class _Costs:
    """Adds up what parts cost while it runs them on shapes, without what they read of one another's results."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._total = Cost()
        self._made: dict[int, Tensor] = {}  # by storage, so that views of a result are known too

    def __call__(self, part: Operation, *args: Any) -> Any:
        given = [argument for argument in args if isinstance(argument, Tensor)]
        read = sum(argument.nbytes for argument in given if storage_of(argument) in self._made)
        self._total += part.cost(*args, workload=self._workload) - Cost(read=read)
        results = part.meta(*args)
        known = {storage_of(argument) for argument in given}
        self._made |= {storage_of(one): one for one in _tensors(results) if storage_of(one) not in known}
        return results

    def without_intermediates(self, results: Any) -> Cost:
        """The cost when only `results` are written."""
        wanted = {storage_of(one) for one in _tensors(results)}
        unwritten = sum(one.nbytes for storage, one in self._made.items() if storage not in wanted)
        return self._total - Cost(written=unwritten)


def _tensors(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def storage_of(tensor: Tensor) -> int:
    """Which storage a tensor views; unlike `data_ptr` it also tells tensors on the meta device apart."""
    return int(tensor.untyped_storage()._cdata)
