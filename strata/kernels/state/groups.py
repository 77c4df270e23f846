"""Layers that keep different kinds of state read different pages of the same step."""

from __future__ import annotations

from typing import Any

from torch.fx import Proxy


def of_group(batch: Any, group: int) -> Any:
    """The sequences of a step as layers of a group are given them, a `PackedBatch`.

    batch: a `Batch`. Group 0 gets the batch itself, and so does every other if all layers share their pages, as without
    pages. A graph that is captured calls this anew in every step.
    """
    if isinstance(batch, Proxy):
        return batch.tracer.create_proxy("call_function", of_group, (batch, group), {})
    return batch.groups[group - 1] if group and batch.groups else batch
