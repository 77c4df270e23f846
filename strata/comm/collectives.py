"""Collectives along an axis: those with gradients, for the forward pass, and those without, which can be awaited.

Along an axis of one rank each is the identity. All ranks of the axis call the same ones in the same order.

`all_gather_json`: small values from every rank to every rank: nothing that is received is ever executed.

`start_transfers`: from one rank of an axis to another, several in one message to the communication library.
"""
# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from strata.comm.mesh import Axis
from strata.comm.observer import CollectiveCall

# torch 2.13 gave these names that earlier versions do not have, and warns of the others.
_dist_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_dist_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks. Backward: the identity, for a result that all ranks go on with alike."""
    return x if axis.group is None else _Differentiable.apply(x, partial(_summed, axis=axis), _same)


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """The identity, for a tensor that all ranks hold alike and use differently. Backward: the sum over the ranks."""
    return x if axis.group is None else _Differentiable.apply(x, _same, partial(_summed, axis=axis))


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The tensors of all ranks, of one shape, one after another along `dim`. Backward: `reduce_scatter`."""
    if axis.group is None:
        return x
    return _Differentiable.apply(x, partial(_gathered, axis=axis, dim=dim), partial(_scattered, axis=axis, dim=dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's part along `dim`, of as many as there are ranks, of the sum over the ranks. Backward: `all_gather`.

    Raises ValueError if the size of `dim` is no multiple of the number of ranks.
    """
    if axis.group is None:
        return x
    return _Differentiable.apply(x, partial(_scattered, axis=axis, dim=dim), partial(_gathered, axis=axis, dim=dim))


def all_to_all(
    x: Tensor, axis: Axis, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Tensor:
    """Rows for each rank out, rows from each rank in, both in the order of the ranks. Backward: the way back.

    sent, received: how many rows (of dimension 0) go to and come from each rank; None for equal parts.
    """
    if axis.group is None:
        return x
    there = partial(_exchanged, axis=axis, sent=sent, received=received)
    return _Differentiable.apply(x, there, partial(_exchanged, axis=axis, sent=received, received=sent))


def shift(x: Tensor, axis: Axis, by: int = 1) -> Tensor:
    """The tensor of the rank `by` places before, around the ring; all of one shape. Backward: shift by -`by`."""
    if axis.group is None:
        return x
    return _Differentiable.apply(x, partial(_shifted, axis=axis, by=by), partial(_shifted, axis=axis, by=-by))


@dataclass(frozen=True)
class Pending:
    """A collective under way. Neither its result nor its inputs may be touched before `wait`."""

    result: Tensor
    works: tuple[dist.Work, ...] = ()
    axis: Axis | None = None
    call: CollectiveCall | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the result."""
        return self.result.shape

    def wait(self) -> Tensor:
        """The result. On a GPU the stream waits, not the host."""
        observer = None if self.axis is None or self.call is None else self.axis.observer
        if observer is not None:
            observer.waits(self.call)
        for work in self.works:
            work.wait()
        if observer is not None:
            observer.waits(None)
        return self.result


def start_all_reduce(x: Tensor, axis: Axis, reduction: Literal["sum", "max", "min"] = "sum") -> Pending:
    """Reduce over the ranks in place, without gradients. x: contiguous."""
    if axis.group is None:
        return Pending(x)
    call = _notify("all_reduce", axis, x)
    return Pending(x, _works(dist.all_reduce(x, _REDUCTIONS[reduction], axis.group, async_op=True)), axis, call)


def start_all_gather(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """The tensors of all ranks one after another along dimension 0, into `out` if given, without gradients.

    `x` may be this rank's part of `out`.
    """
    if axis.group is None:
        return Pending(x if out is None else out.copy_(x))
    if out is None:
        out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    call = _notify("all_gather", axis, x)
    return Pending(out, _works(_dist_all_gather(out, x.contiguous(), axis.group, async_op=True)), axis, call)


def start_reduce_scatter(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
    """This rank's part along dimension 0 of the sum over the ranks, into `out` if given, without gradients."""
    if axis.group is None:
        return Pending(x if out is None else out.copy_(x))
    if out is None:
        out = x.new_empty((shard_size(x.shape[0], axis.size, axis.name), *x.shape[1:]))
    call = _notify("reduce_scatter", axis, x)
    work = _dist_reduce_scatter(out, x.contiguous(), group=axis.group, async_op=True)
    return Pending(out, _works(work), axis, call)


def start_all_to_all(
    x: Tensor, axis: Axis, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
) -> Pending:
    """`all_to_all` without gradients."""
    if axis.group is None:
        return Pending(x)
    out = x.new_empty((x.shape[0] if received is None else sum(received), *x.shape[1:]))
    counts = _list(received), _list(sent)
    call = _notify("all_to_all", axis, x)
    work = dist.all_to_all_single(out, x.contiguous(), *counts, axis.group, async_op=True)
    return Pending(out, _works(work), axis, call)


def start_shift(x: Tensor, axis: Axis, by: int = 1) -> Pending:
    """`shift` without gradients."""
    if axis.group is None or by % axis.size == 0:
        return Pending(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    to, source = (axis.ranks[(axis.index + step) % axis.size] for step in (by, -by))
    transfers = [
        dist.P2POp(dist.isend, x.contiguous(), to, axis.group),
        dist.P2POp(dist.irecv, out, source, axis.group),
    ]
    call = _notify("shift", axis, x)
    return Pending(out, tuple(dist.batch_isend_irecv(transfers)), axis, call)


def _notify(operation: str, axis: Axis, x: Tensor) -> CollectiveCall | None:
    """Notify the axis's observer, if it has one, that a collective starts."""
    if axis.observer is None or torch.compiler.is_compiling():
        return None
    return axis.observer.started(operation, axis.name, axis.ranks, x.nbytes)


def _works(work: dist.Work | None) -> tuple[dist.Work, ...]:
    return () if work is None else (work,)


def shard_size(size: int, ranks: int, axis: str) -> int:
    """What each rank gets of so many rows. Raises ValueError if they are no multiple of the number of ranks."""
    if size % ranks:
        raise ValueError(f"{size} rows do not divide into {ranks} parts along axis {axis}; pad them")
    return size // ranks


# The collectives below wait at once and so are asked of torch in the form that torch.compile can trace.


def _enter(operation: str, axis: Axis, x: Tensor) -> CollectiveCall | None:
    call = _notify(operation, axis, x)
    if axis.observer is not None and call is not None:
        axis.observer.waits(call)
    return call


def _leave(axis: Axis, call: CollectiveCall | None) -> None:
    if axis.observer is not None and call is not None:
        axis.observer.waits(None)


def _summed(x: Tensor, axis: Axis) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    call = _enter("all_reduce", axis, out)
    dist.all_reduce(out, group=axis.group)
    _leave(axis, call)
    return out


def _gathered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Contiguous: kernels that read gathered logits take the columns of a row to lie side by side."""
    dim %= x.dim()
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    call = _enter("all_gather", axis, x)
    _dist_all_gather(out, x.contiguous(), axis.group)
    _leave(axis, call)
    return out.view(axis.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _scattered(x: Tensor, axis: Axis, dim: int) -> Tensor:
    rows = x.movedim(dim, 0).contiguous()
    out = rows.new_empty((shard_size(rows.shape[0], axis.size, axis.name), *rows.shape[1:]))
    call = _enter("reduce_scatter", axis, rows)
    _dist_reduce_scatter(out, rows, group=axis.group)
    _leave(axis, call)
    return out.movedim(0, dim)


def _exchanged(x: Tensor, axis: Axis, sent: Sequence[int] | None, received: Sequence[int] | None) -> Tensor:
    out = x.new_empty((x.shape[0] if received is None else sum(received), *x.shape[1:]))
    call = _enter("all_to_all", axis, x)
    dist.all_to_all_single(out, x.contiguous(), _list(received), _list(sent), axis.group)
    _leave(axis, call)
    return out


def _shifted(x: Tensor, axis: Axis, by: int) -> Tensor:
    return start_shift(x, axis, by).wait()


def _list(counts: Sequence[int] | None) -> list[int] | None:
    return None if counts is None else list(counts)


class _Differentiable(torch.autograd.Function):
    """What `run` makes of a tensor; `back` makes the tensor's gradient of that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def all_gather_json(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """The values of all ranks along the axis, in their order. Waits for them.

    value: what JSON can hold. device: of the run (`World.device`). Every rank calls this.
    """
    return [json.loads(text) for text in all_gather_bytes(json.dumps(value).encode(), axis, device)]


def all_gather_bytes(own: bytes, axis: Axis, device: torch.device) -> list[bytes]:
    """The same of bytes, one or more on each rank."""
    if axis.group is None:
        return [own]
    row = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    sizes = start_all_gather(torch.tensor([len(own)], device=device), axis).wait().tolist()
    padded = row.new_zeros(max(sizes))
    padded[: len(own)] = row
    rows = start_all_gather(padded[None], axis).wait().cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


@dataclass(frozen=True)
class Transfer:
    """tensor: what is sent, contiguous, or where it arrives. source, target: places along the axis, one of them own."""

    tensor: Tensor
    source: int
    target: int


@dataclass(frozen=True)
class PendingTransfers:
    """Transfers under way. None of their tensors may be touched before `wait`."""

    transfers: tuple[Transfer, ...]  # keeps what is sent
    works: tuple[dist.Work, ...]
    axis: Axis
    calls: tuple[CollectiveCall, ...]

    def wait(self) -> None:
        """Until all have ended. On a GPU the stream waits, not the host."""
        observer = self.axis.observer
        if observer is not None:
            observer.waits(self.calls[0])
        for number, work in enumerate(self.works):
            if observer is not None and len(self.works) == len(self.calls):  # NCCL has one work for all
                observer.waits(self.calls[number])
            work.wait()
        if observer is not None:
            observer.waits(None)


def start_transfers(transfers: Sequence[Transfer], axis: Axis) -> PendingTransfers:
    """Begin them all. The two ranks of a transfer start those between them in one order."""
    operations = []
    calls = []
    for one in transfers:
        sends = one.source == axis.index
        peer = axis.ranks[one.target if sends else one.source]
        operations.append(dist.P2POp(dist.isend if sends else dist.irecv, one.tensor, peer, axis.group))
        if axis.observer is not None:
            ranks = axis.ranks[one.source], axis.ranks[one.target]
            calls.append(axis.observer.started("transfer", axis.name, ranks, one.tensor.nbytes))
    works = dist.batch_isend_irecv(operations)
    return PendingTransfers(tuple(transfers), tuple(works), axis, tuple(calls))
