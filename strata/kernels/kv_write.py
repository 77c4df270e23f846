"""Put the keys and values of new tokens where they stay: into the pages of their sequences."""

from __future__ import annotations

from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation
from strata.kernels.paged import PagedKV


def _cost(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int, *, workload: Workload) -> Cost:
    if pages is None:
        return Cost()
    return Cost(read=k.nbytes + v.nbytes + pages.slots.nbytes, written=k.nbytes + v.nbytes)


def _meta(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape, device="meta"), v.new_empty(v.shape, device="meta")


@operation(_cost, meta=_meta, mutates=("pages",))
def kv_write(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int) -> tuple[Tensor, Tensor]:
    """Write k and v [tokens, kv_heads, head_dim] into the pools of a layer at `pages.slots`; slot -1 writes nothing.

    Returns k and v themselves. Without pages nothing is written.
    """
    if pages is None:
        return k, v
    kept = pages.slots >= 0
    slots = pages.slots[kept].long()
    for new, pool in ((k, pages.keys[layer]), (v, pages.values[layer])):
        pool.flatten(0, 1)[slots] = new[kept].to(pool.dtype)
    return k, v


@kv_write.implement("index_put", "cpu", invariant=True)
def _index_put(k: Tensor, v: Tensor, pages: PagedKV | None, layer: int) -> tuple[Tensor, Tensor]:
    if pages is None:
        return k, v
    slots = pages.slots
    if slots.numel() and int(slots.min()) < 0:
        return kv_write.reference(k, v, pages, layer)  # type: ignore[no-any-return]
    pages.keys[layer].flatten(0, 1).index_put_((slots,), k)
    pages.values[layer].flatten(0, 1).index_put_((slots,), v)
    return k, v
