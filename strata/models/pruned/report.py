"""What zeros a checkpoint has, and what they save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from strata.kernels.quant.two_of_four import BYTE_COLUMNS, is_two_of_four
from strata.models.quantized.calibrate.matrices import layer_views, products
from strata.models.quantized.calibrate.rewrite import stored_dtype
from strata.models.quantized.calibrate.stream import LayerStream


@dataclass(frozen=True)
class Zeros:
    """Of all matrices of a kind, such as "down_proj". two_of_four: how many are 2:4 sparse.

    nbytes: in the checkpoint, zeros among them. quantized_bytes: of those that can be compressed as 2:4, compressed,
    and of the others as they are.
    """

    kind: str
    matrices: int = 0
    weights: int = 0
    zeros: int = 0
    two_of_four: int = 0
    nbytes: int = 0
    quantized_bytes: int = 0

    @property
    def share(self) -> float:
        return self.zeros / max(1, self.weights)


def zeros_of(folder: Path) -> list[Zeros]:
    """By kind of product, and last of all together ("all"). Reads the weights layer by layer, in float32."""
    found: dict[str, Zeros] = {}
    for one in _matrices(folder):
        found[one.kind] = _sum(found.get(one.kind, Zeros(one.kind)), one)
    everything = Zeros("all")
    for one in found.values():
        everything = _sum(everything, one)
    return [*found.values(), everything]


def _matrices(folder: Path) -> Iterator[Zeros]:
    stream = LayerStream(folder, torch.device("cpu"))
    for number in range(stream.layers):
        with stream.opened(number):
            views = {name: view for name, _, view in layer_views(stream.model, number)}
            for matrix in products(stream.model, number):
                weight = views[matrix.name]
                size, holds = weight.numel() * stored_dtype(stream, matrix.name).itemsize, is_two_of_four(weight)
                packed = size // 2 + weight.numel() // BYTE_COLUMNS
                can = holds and weight.shape[1] % BYTE_COLUMNS == 0
                zeros = weight.numel() - int(weight.count_nonzero())
                kind = matrix.name.removesuffix(".weight").rpartition(".")[2]
                yield Zeros(kind, 1, weight.numel(), zeros, int(holds), size, packed if can else size)


def _sum(one: Zeros, other: Zeros) -> Zeros:
    numbers = {name: value + getattr(other, name) for name, value in vars(one).items() if name != "kind"}
    return replace(one, **numbers)
