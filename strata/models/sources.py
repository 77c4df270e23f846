"""Where the weights of a model come from: which tensor of a checkpoint each is, or a part of, and boxes read of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from strata.kernels.quant.quantized import QuantizedWeight
from strata.models.checkpoint import StoredTensor, shorten
from strata.models.experts import stored_name, stored_parameters
from strata.models.joined import read_expert, split_experts, split_tensors
from strata.models.layers import CausalLM
from strata.models.shard import Box, Boxes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Old checkpoints store the frequencies of the rotary embedding, which follow from config.json.
DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Rows are copied in pieces of about this size: what the host holds beyond the file's own pages.
_PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TensorSource:
    """One matrix or vector of a model, whole, of which boxes are read. reader: of the safetensors file that it lies in,
    or `InMemory`."""

    stored: StoredTensor
    reader: Any

    def copy(self, box: Box, target: Tensor) -> None:
        """A box into `target`, of its sizes, on any device and of any float type."""
        for rows, piece in pieces(self.reader, self.stored, box):
            target[rows].copy_(piece)

    def quantized(self, boxes: Boxes) -> QuantizedWeight | None:
        """Boxes, one above the other, of what is packed already, on the CPU; None: it is in floats."""
        return None


@dataclass(frozen=True)
class InMemory:
    """A tensor that is read as a file's tensors are."""

    tensor: Tensor

    def get_slice(self, name: str) -> Tensor:
        return self.tensor


def pieces(reader: Any, stored: StoredTensor, box: Box) -> Iterator[tuple[slice, Tensor]]:
    """A box of a stored tensor in pieces of about `_PIECE_BYTES`, each with its rows, counted from the box's first."""
    (first, end), *others = box
    row_bytes = math.prod(last - start for start, last in others) * stored.dtype.itemsize
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    if stored.expert is not None:
        if end > first:
            yield slice(0, end - first), read_expert(reader, stored, box)
        return
    tensor = reader.get_slice(stored.name)
    columns = [slice(*bounds) for bounds in others]
    for start in range(first, end, step):
        last = min(start + step, end)
        rows = slice(stored.first_row + start, stored.first_row + last)
        yield slice(start - first, last - first), tensor[(rows, *columns)]


def match_tensors(model: nn.Module, tensors: Mapping[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """For each of the `stored_parameters` of `model` its tensor in the checkpoint.

    A tied head needs no tensor of its own, and its tensor may stand for the embedding's. Raises ValueError that names
    the tensors if some are missing, unexpected, or of another shape than config.json says.
    """
    wanted = stored_parameters(model)
    tensors = split_experts(model, wanted, split_tensors(model, wanted, dict(tensors), folder), folder)
    tied, embedding = HEAD not in wanted, stored_name(model, EMBEDDING)
    names = {name: name for name in wanted}
    if tied and embedding not in tensors and HEAD in tensors:
        names[embedding] = HEAD
    if missing := [name for name in wanted if names[name] not in tensors]:
        raise ValueError(f"{folder} lacks tensors that its config.json calls for: {shorten(missing)}")
    known = {*names.values(), HEAD} if tied else set(names.values())
    others = (name for name in tensors if name not in known and not DERIVED.fullmatch(name))
    if unexpected := [name for name in others if not is_passed_over(model, name)]:
        raise ValueError(f"{folder} has tensors that its config.json does not call for: {shorten(unexpected)}")
    misshapen = [
        f"{names[name]} is {list(tensors[names[name]].shape)}, expected {list(parameter.shape)}"
        for name, parameter in wanted.items()
        if tensors[names[name]].shape != tuple(parameter.shape)
    ]
    if misshapen:
        raise ValueError(f"{folder} has tensors of other shapes than its config.json says: {shorten(misshapen)}")
    return {name: tensors[names[name]] for name in wanted}


def is_passed_over(model: nn.Module, name: str) -> bool:
    """Whether a tensor of a checkpoint is of layers that predict further tokens (MTP), which no graph runs."""
    if not isinstance(model, CausalLM):
        return False
    at = _LAYER.match(name) if model.has_layers_behind else None
    return (at is not None and int(at[1]) >= len(model.model.layers)) or name.startswith(model.passed_over)
