"""`quant_method: mxfp4`: the experts of gpt-oss as they lie in the file.

`strata.models.joined` reads the same tensors as floats, which is what loading does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.kernels.quant.packed import MX_GROUP, PackedWeight, Scheme
from strata.models.checkpoint import StoredTensor
from strata.models.joined import PARTS
from strata.models.quantized.formats.matrices import PackedMatrix
from strata.models.quantized.formats.stored import StoredTensors


def read_mxfp4(stored: StoredTensors) -> dict[str, PackedMatrix]:
    """The matrices of a checkpoint, by name: `<block>.experts.<number>.gate_proj.weight` and so on."""
    matrices: dict[str, PackedMatrix] = {}
    for name, parts in PARTS.items():
        for block in stored.owners(f"{name}_blocks"):
            values = stored.take(f"{block}.{name}_blocks", (torch.uint8,), dims=4)
            count, rows, groups, held = values.shape
            if 2 * held != MX_GROUP or rows % len(parts):
                raise ValueError(
                    f"{stored.folder}: {values.name} is {list(values.shape)}, expected [experts, rows, groups, "
                    f"{MX_GROUP // 2}] with {len(parts)} matrices row by row"
                )
            scales = stored.take(f"{block}.{name}_scales", (torch.uint8,), (count, rows, groups))
            for number in range(count):
                for place, part in enumerate(parts):
                    matrix = _ExpertMatrix(stored, values, scales, number, place, len(parts))
                    matrices[f"{block}.{number}.{part}.weight"] = matrix
    return matrices


@dataclass(frozen=True)
class _ExpertMatrix:
    """Of one expert every `parts`-th row from `place` on."""

    stored: StoredTensors
    values: StoredTensor
    scales: StoredTensor
    number: int
    place: int
    parts: int
    step: int = 1

    @property
    def scheme(self) -> Scheme:
        return Scheme("e2m1", 1, MX_GROUP)

    @property
    def shape(self) -> tuple[int, int]:
        _, rows, groups, _ = self.values.shape
        return rows // self.parts, groups * MX_GROUP

    def rows(self, first: int, end: int) -> PackedWeight:
        box = slice(self.number, self.number + 1), slice(first * self.parts, end * self.parts)
        own = slice(self.place, None, self.parts)
        values = self.stored.read(self.values, *box)[0, own].flatten(1).contiguous()
        scales = self.stored.read_scales(self.scales, *box)[0, own].contiguous()
        return PackedWeight.of(self.scheme, values, scales)
