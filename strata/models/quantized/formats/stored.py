"""The tensors of a checkpoint with packed weights: asked for by name, checked from headers, read in slices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strata.kernels.quant.quantized import MIN_SCALE
from strata.models.checkpoint import StoredTensor, shorten

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# What a value that stands for none is in E8M0 (OCP Microscaling Formats specification 1.0, 5.4.1).
_E8M0_NAN = 255
# Last parts of the names that packed weights and what belongs to them have in any format.
_OF_PACKED = re.compile(
    r"weight_packed|weight_shape|weight_g_idx|qweight|qzeros|scales|g_idx|pre_quant_scale|.*_scale(_inv|_2)?|"
    r".*_zero_point|svdquant_.*"
)
# A scale of whole matrices, or of all rows that one multiplies.
ONE = ((), (1,), (1, 1))
# Products of all experts are one here.
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass
class InputScale:
    """The scale that one product has for the rows it multiplies (static): the largest of its matrices'."""

    tensors: StoredTensors
    sources: list[StoredTensor] = field(default_factory=list)

    @cached_property
    def value(self) -> float:
        """Raises ValueError for scales of which one is no finite number, or none positive."""
        largest = max(float(self.tensors.read_scales(one)) for one in self.sources)
        if largest < MIN_SCALE:
            first = self.sources[0]
            raise ValueError(f"{first.file}: {first.name} is {largest:.3g}; accepted is a scale of at least 2^-126")
        return largest


class StoredTensors:
    """The tensors of one checkpoint, of which a format takes those that it reads.

    input_scales: by matrix, those that were taken.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], folder: Path) -> None:
        self.folder = folder
        self._tensors = tensors
        self._taken: set[str] = set()
        self._readers: dict[Path, Any] = {}
        self.input_scales: dict[str, InputScale] = {}
        self._products: dict[str, InputScale] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def owners(self, last: str, *dtypes: torch.dtype) -> list[str]:
        """Of the tensors that are called `owner.last`, of these dtypes or any, the owners."""
        ending = f".{last}"
        found = (name for name, stored in self._tensors.items() if not dtypes or stored.dtype in dtypes)
        return [name.removesuffix(ending) for name in found if name.endswith(ending)]

    def take(
        self, name: str, dtypes: Sequence[torch.dtype], *shapes: tuple[int, ...], dims: int | None = None
    ) -> StoredTensor:
        """The tensor of that name, which must be of one of the dtypes and of the shapes, or of `dims` dimensions."""
        stored = self._tensors.get(name)
        if stored is None:
            raise ValueError(f"{self.folder} lacks {name}, without which packed weights cannot be read")
        if stored.dtype not in dtypes:
            accepted = ", ".join(map(_dtype_name, dtypes))
            raise ValueError(f"{self.folder}: {name} has dtype {_dtype_name(stored.dtype)}; accepted is {accepted}")
        if (shapes and stored.shape not in shapes) or (dims is not None and len(stored.shape) != dims):
            accepted = f"{dims} dimensions" if dims is not None else " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{self.folder}: {name} is {list(stored.shape)}, expected {accepted}")
        self._taken.add(name)
        return stored

    def take_input_scale(self, owner: str, *lasts: str) -> None:
        """The scale of what the matrix of `owner` multiplies, under the first of these last names that there is."""
        name = next((name for last in lasts if (name := f"{owner}.{last}") in self), f"{owner}.{lasts[0]}")
        source, product = self.take(name, FLOATS, *ONE), _EXPERT.sub(".experts.*.", owner)
        scale = self._products.setdefault(product, InputScale(self))
        scale.sources.append(source)
        self.input_scales[f"{owner}.weight"] = scale

    def pass_over(self, name: str) -> None:
        """Let a tensor that there may be be without effect."""
        if name in self._tensors:
            self._taken.add(name)

    def finish(self) -> frozenset[str]:
        """The names of all that was taken. Raises ValueError for packed tensors, or scales, that nobody took."""
        floats = (*FLOATS, torch.float64)
        left = [
            name
            for name, stored in self._tensors.items()
            if name not in self._taken and (stored.dtype not in floats or _OF_PACKED.fullmatch(name.rpartition(".")[2]))
        ]
        if left:
            raise ValueError(
                f"{self.folder} holds packed weights or scales that its quantization_config does not call for: "
                f"{shorten(left)}"
            )
        return frozenset(self._taken)

    def read(self, stored: StoredTensor, *slices: slice) -> Tensor:
        """A tensor, or what slices leave of its first dimensions; a file that was opened stays so."""
        if stored.file not in self._readers:
            self._readers[stored.file] = safe_open(stored.file, framework="pt", device="cpu")
        reader = self._readers[stored.file]
        value: Tensor = reader.get_slice(stored.name)[slices] if slices else reader.get_tensor(stored.name)
        return value

    def read_scales(self, stored: StoredTensor, *slices: slice) -> Tensor:
        """As `read`, of scales; E8M0 as bytes. Raises ValueError for one that is no finite number."""
        scales = self.read(stored, *slices)
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        whole = scales != _E8M0_NAN if scales.dtype == torch.uint8 else scales.float().isfinite()
        if not bool(whole.all()):
            raise ValueError(f"{stored.file}: {stored.name} holds a scale that is not a finite number")
        return scales


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
