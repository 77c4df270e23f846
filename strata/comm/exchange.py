"""Small values from every rank to every rank, as JSON: nothing that is received is ever executed."""

from __future__ import annotations

import json
from typing import Any

import torch

from strata.comm.collectives import start_all_gather
from strata.comm.mesh import Axis


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
