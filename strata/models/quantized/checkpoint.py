"""A checkpoint folder, matched with a model: which of its matrices are packed, and reading boxes of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from strata.files.json_object import read_object
from strata.files.weight_index import INDEX, SINGLE
from strata.kernels.quant.packed import PackedWeight, join
from strata.models.checkpoint import StoredTensor, read_checkpoint, shorten
from strata.models.experts import stored_parameters
from strata.models.part import Boxes
from strata.models.quantized.formats.read import MODELOPT_FILE, PackedFormat, read_format
from strata.models.weights import match_tensors


@dataclass(frozen=True)
class Checkpoint:
    """tensors: of the folder, packed matrices as one tensor of their shape. sources: where each of the stored
    parameters of a whole model is. format: of the packed matrices; None: there are none."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    sources: Mapping[str, StoredTensor]
    format: PackedFormat | None

    @staticmethod
    def of(folder: Path, complete: nn.Module) -> Checkpoint:
        """complete: the model of the folder's config; it may be on the meta device. Raises ValueError as
        `read_checkpoint`, `read_format` and `match_tensors` do, and for a matrix that is there packed and in floats.
        """
        format = packed_format(folder)
        tensors = read_checkpoint(folder, packed=format is not None)
        if format is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in format.claimed}
            if twice := sorted(tensors.keys() & format.matrices):
                raise ValueError(
                    f"{folder} holds matrices packed and in floats, too: {shorten(twice)}; remove what is not meant"
                )
            tensors = _without_empty_biases(tensors, format, complete)
            tensors |= {
                name: StoredTensor(name, folder, torch.float32, format.shape(name), 0) for name in format.matrices
            }
        return Checkpoint(folder, tensors, match_tensors(complete, tensors, folder), format)

    def is_packed(self, stored: str) -> bool:
        """stored: what the model's checkpoints call a matrix; where they join some, of a part."""
        return self.format is not None and self.sources[stored].name in self.format.matrices

    def read(self, stored: str, boxes: Boxes) -> PackedWeight:
        """Boxes of a packed matrix, one above the other, on the CPU."""
        assert self.format is not None
        source, parts = self.sources[stored], []
        for rows, columns in boxes:
            first, end = (source.first_row + row for row in rows)
            parts.append(self.format.read(source.name, (first, end), columns))
        return parts[0] if len(parts) == 1 else join(parts)


def _without_empty_biases(
    tensors: Mapping[str, StoredTensor], format: PackedFormat, complete: nn.Module
) -> dict[str, StoredTensor]:
    """The tensors but for biases, zeros throughout, of packed matrices that have none in the model: AutoGPTQ wrote them
    (AutoGPTQ/AutoGPTQ#555, 2024-02)."""
    wanted = stored_parameters(complete)
    extra = {name.removesuffix("weight") + "bias" for name in format.matrices} & tensors.keys() - wanted.keys()
    return {name: one for name, one in tensors.items() if name not in extra or not _is_zero(one)}


def _is_zero(stored: StoredTensor) -> bool:
    with safe_open(stored.file, framework="pt", device="cpu") as reader:
        return not bool(reader.get_tensor(stored.name).any())


def packed_format(folder: Path) -> PackedFormat | None:
    """Of a folder's packed weights; None if it has none, or no weights at all."""
    if not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return None
    config = read_object(folder / "config.json")
    return (
        read_format(config, read_checkpoint(folder, packed=True), folder) if tells_of_packed(folder, config) else None
    )


def tells_of_packed(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder says that its weights are packed; config: the contents of config.json."""
    return config.get("quantization_config") is not None or (folder / MODELOPT_FILE).is_file()
