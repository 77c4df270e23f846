"""A checkpoint folder, matched with a model: which of its matrices are packed, and reading boxes of these."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from strata.files.json_object import read_object
from strata.files.weight_index import INDEX, SINGLE
from strata.kernels.quant.quantized import QuantizedWeight, dense, join
from strata.models.checkpoint import StoredTensor, read_checkpoint, shorten
from strata.models.experts import stored_parameters, stored_views
from strata.models.quantized.formats.read import MODELOPT_FILE, QuantizedFormat, read_format
from strata.models.shard import Box, Boxes, whole
from strata.models.sources import TensorSource, match_tensors, pieces


@dataclass(frozen=True)
class Checkpoint:
    """tensors: of the folder, packed matrices as one tensor of their shape. sources: where each of the stored
    parameters of a whole model is. format: of the packed matrices; None: there are none."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    sources: Mapping[str, StoredTensor]
    format: QuantizedFormat | None

    @staticmethod
    def of(folder: Path, complete: nn.Module) -> Checkpoint:
        """complete: the model of the folder's config; it may be on the meta device. Raises ValueError as
        `read_checkpoint`, `read_format` and `match_tensors` do, and for a matrix that is there packed and in floats.
        """
        format = quantized_format(folder)
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

    def is_quantized(self, stored: str) -> bool:
        """stored: what the model's checkpoints call a matrix; where they join some, of a part."""
        return self.format is not None and self.sources[stored].name in self.format.matrices

    def read(self, stored: str, boxes: Boxes) -> QuantizedWeight:
        """Boxes of a packed matrix, one above the other, on the CPU."""
        return _Packed(self.sources[stored], self.format).quantized(boxes)

    def read_all(self, wanted: Iterable[str]) -> Iterator[tuple[str, TensorSource]]:
        """Stored parameters, to be read as they come: file by file and in the order of the file."""
        order = sorted(wanted, key=lambda name: (self.sources[name].file, self.sources[name].place))
        for file, of_file in itertools.groupby(order, key=lambda name: self.sources[name].file):
            if file == self.folder:
                yield from ((name, _Packed(self.sources[name], self.format)) for name in of_file)
                continue
            with safe_open(file, framework="pt", device="cpu") as reader:
                yield from ((name, TensorSource(self.sources[name], reader)) for name in of_file)

    def parameters(self, model: nn.Module, wanted: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """The `wanted` parameters of a model one after another, whole, in float32 on the CPU. model: that of the
        folder's config; it may be on the meta device."""
        for name, parameter in model.named_parameters():
            if name not in wanted:
                continue
            value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            views = dict(stored_views(model, name, value))
            for stored, source in self.read_all(views):
                source.copy(whole(source.stored.shape), views[stored])
            yield name, value

    def check_tied(self, head: str, embedding: str, boxes: Boxes) -> None:
        """Raises ValueError if a head that config.json ties to the embedding is stored all the same, and is another in
        the boxes that are read."""
        if not {head, embedding} <= self.tensors.keys() or all(self._alike(head, embedding, box) for box in boxes):
            return
        packed = self.format is not None and {head, embedding} & self.format.matrices
        how = "are packed apart" if packed else "differ"
        raise ValueError(
            f"{self.folder}: config.json ties {head} to {embedding}, but they {how}; "
            "set tie_word_embeddings to false there if the head is meant to be its own"
        )

    def _alike(self, one: str, other: str, box: Box) -> bool:
        pair, format = (one, other), self.format
        if format is not None and not format.matrices.isdisjoint(pair):
            return format.matrices >= {*pair} and torch.equal(*(dense(format.read(name, *box)) for name in pair))
        mine, others = self.tensors[one], self.tensors[other]
        if (mine.shape, mine.dtype) != (others.shape, others.dtype):
            return False
        with safe_open(mine.file, framework="pt") as reader, safe_open(others.file, framework="pt") as another:
            pairs = zip(pieces(reader, mine, box), pieces(another, others, box), strict=True)
            return all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in pairs)


class _Packed(TensorSource):
    """Of a matrix that a checkpoint has packed. reader: a `QuantizedFormat`."""

    def copy(self, box: Box, target: Tensor) -> None:
        target.copy_(dense(self.quantized((box,))))

    def quantized(self, boxes: Boxes) -> QuantizedWeight:
        stored, parts = self.stored, []
        for rows, columns in boxes:
            first, end = (stored.first_row + row for row in rows)
            parts.append(self.reader.read(stored.name, (first, end), columns))
        return parts[0] if len(parts) == 1 else join(parts)


def _without_empty_biases(
    tensors: Mapping[str, StoredTensor], format: QuantizedFormat, complete: nn.Module
) -> dict[str, StoredTensor]:
    """The tensors but for biases, zeros throughout, of packed matrices that have none in the model: AutoGPTQ wrote them
    (AutoGPTQ/AutoGPTQ#555, 2024-02)."""
    wanted = stored_parameters(complete)
    extra = {name.removesuffix("weight") + "bias" for name in format.matrices} & tensors.keys() - wanted.keys()
    return {name: one for name, one in tensors.items() if name not in extra or not _is_zero(one)}


def _is_zero(stored: StoredTensor) -> bool:
    with safe_open(stored.file, framework="pt", device="cpu") as reader:
        return not bool(reader.get_tensor(stored.name).any())


def quantized_format(folder: Path) -> QuantizedFormat | None:
    """Of a folder's packed weights; None if it has none, or no weights at all."""
    if not ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return None
    config = read_object(folder / "config.json")
    return (
        read_format(config, read_checkpoint(folder, packed=True), folder)
        if is_quantized_folder(folder, config)
        else None
    )


def is_quantized_folder(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder says that its weights are packed; config: the contents of config.json."""
    return config.get("quantization_config") is not None or (folder / MODELOPT_FILE).is_file()
