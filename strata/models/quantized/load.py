"""From a checkpoint folder, or from nothing, to a model whose products have packed weights, matrix by matrix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from strata.kernels.quant.packed import TWO_OF_FOUR, PackedWeight, Scheme, dense
from strata.kernels.quant.two_of_four import least_two_of_four
from strata.models import weights
from strata.models.checkpoint import StoredTensor
from strata.models.config import ModelConfig
from strata.models.experts import stored_name, stored_parameters
from strata.models.families import build
from strata.models.initialize import dummy_values
from strata.models.layers import CausalLM
from strata.models.memory import require_memory
from strata.models.part import Box, Boxes, ModelPart, boxes, held, inside, pairs, whole
from strata.models.quantized.assembly import Assembly, assembly, meta_weights, numbered, pack_boxes
from strata.models.quantized.checkpoint import Checkpoint
from strata.models.quantized.matrices import OwnMatrix, own_matrices

_ADVICE = "; leave out sparsity=, or prune by strata prune --pattern 2:4"


def load_packed(
    model: str | Path,
    schemes: Mapping[str, Scheme],
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    max_length: int | None = None,
    seed: int = 0,
    part: ModelPart | None = None,
) -> tuple[CausalLM, ModelConfig, dict[str, PackedWeight]]:
    """As `strata.models.weights.load`, with some parameters packed while they are read; these are on the meta device in
    the model, and their packed weights come beside it.

    schemes: of the parameters that are to be packed; others than the part has are passed over. Of a checkpoint that is
    packed already they only tell which parameters stay so; what else is packed there becomes floats. Values are rounded
    to `dtype` before they are packed, as they are in a model that is not. A part's scales are those of the whole
    matrix, so parts of any number of ranks stand for the same values. Memory: the packed weights, and one matrix in
    floats (of dummy weights, one parameter). Raises ValueError as `load` does, and for a parameter that its scheme
    cannot pack.
    """
    config, folder = weights.resolve(model, load_format)
    device = torch.device(device)
    dtype = weights.resolve_dtype(dtype, config, device)
    with torch.device("meta"):
        complete = build(config, max_length)
        made = complete if part is None else part.build(max_length)
    own = {name for name, _ in made.named_parameters()}
    schemes = {name: scheme for name, scheme in schemes.items() if name in own}
    reader = None
    if folder is not None and load_format != "dummy":
        reader = _Folder(Checkpoint.of(folder, complete), config, complete, made, part)
    packed_already = reader is not None and reader.checkpoint.format is not None
    stored = reader.checkpoint if reader and packed_already else None
    planned = meta_weights(made, complete, part, schemes, stored, dtype)
    require_memory(packed_bytes(made, dtype, planned), device, dtype)
    assemblies = {name: assembly(made, name) for name in schemes}
    weights.allocate(made, device, dtype, schemes)
    with torch.no_grad():
        if reader is None:
            _randomize(made, complete, part, schemes, assemblies, seed, device, dtype)
        else:
            reader.read(schemes, assemblies, device, dtype)
    packed = {name: one.weight for name, one in assemblies.items()}
    return made, config if part is None else part.config, packed


def packed_bytes(model: CausalLM, dtype: torch.dtype, packed: Mapping[str, PackedWeight]) -> int:
    """What a model takes of which these parameters are packed and the others of `dtype`. All may be on the meta
    device."""
    floats = sum(model.get_parameter(name).numel() for name in packed) * dtype.itemsize
    return weights.weight_bytes(model, dtype) - floats + sum(weight.nbytes for weight in packed.values())


def _randomize(
    model: CausalLM,
    complete: CausalLM,
    part: ModelPart | None,
    schemes: Mapping[str, Scheme],
    assemblies: Mapping[str, Assembly],
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """The values of `randomize_part`, some of them packed."""
    parameters = dict(model.named_parameters())
    for name, value in dummy_values(complete, seed, device, dtype):
        if name not in parameters:  # of another stage
            continue
        for number, (source, target) in enumerate(pairs(complete, model, name, value, parameters[name])):
            shape = tuple(source.shape)
            places: Boxes = (whole(shape),) if part is None else part.boxes(name, shape)
            if name in schemes:
                for further, matrix in enumerate(own_matrices(name, shape, places)):
                    values = partial(_with_zeros if schemes[name].values == TWO_OF_FOUR else _taken, source, matrix)
                    packed = pack_boxes(values, matrix.shape, matrix.boxes, schemes[name])
                    assemblies[name].put(number + further, packed)
            else:
                for box, place in held(target, places):
                    place.copy_(source[inside(box)])


def _taken(value: Tensor, matrix: OwnMatrix, box: Box) -> Tensor:
    taken = value[inside(matrix.in_tensor(box))]
    return taken.view(taken.shape[-2:])


def _with_zeros(value: Tensor, matrix: OwnMatrix, box: Box) -> Tensor:
    """Random weights have no zeros of their own; the least become zeros."""
    taken = _taken(value, matrix, box)
    return taken.masked_fill(least_two_of_four(taken.abs()), 0.0)


class _Folder:
    """A checkpoint folder that is read into a model, or into a part of it."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, complete: CausalLM, model: CausalLM, part: ModelPart | None
    ) -> None:
        self.checkpoint, self._config, self._complete, self._model = checkpoint, config, complete, model
        shapes = {name: stored.shape for name, stored in checkpoint.sources.items()}
        self._places = boxes(model, part, shapes)

    def read(
        self,
        schemes: Mapping[str, Scheme],
        assemblies: Mapping[str, Assembly],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Fill the parameters that are not packed, then pack the others, each file by file."""
        checkpoint = self.checkpoint
        found = {stored: (name, number) for stored, name, number in numbered(self._model, schemes)}
        left = {stored: box for stored, box in self._places.items() if stored not in found}
        plain = {stored: box for stored, box in left.items() if not checkpoint.is_packed(stored)}
        weights.fill(self._model, dict(checkpoint.sources), plain)
        self._check_head(plain)
        parameters = stored_parameters(self._model)
        for stored in left.keys() - plain.keys():
            for box, place in held(parameters[stored].detach(), left[stored]):
                place.copy_(dense(checkpoint.read(stored, (box,))))
        if checkpoint.format is None:
            self._pack(found, schemes, assemblies, device, dtype)
            return
        for stored, (name, number) in found.items():
            assemblies[name].put(number, checkpoint.read(stored, self._places[stored]).to(device))

    def _check_head(self, plain: dict[str, Boxes]) -> None:
        """As `weights.check_head`, whichever of the embedding and the head that is tied to it is packed."""
        checkpoint = self.checkpoint
        format, embedding = checkpoint.format, stored_name(self._complete, "model.embed_tokens.weight")
        pair = {"lm_head.weight", embedding}
        if format is None or not pair & format.matrices:
            weights.check_head(self._complete, self._config, dict(checkpoint.tensors), checkpoint.folder, plain)
        elif self._config.tied and pair <= checkpoint.tensors.keys() and embedding in self._places:
            ((rows, columns),) = self._places[embedding]
            alike = pair <= format.matrices and torch.equal(
                *(dense(format.read(name, rows, columns)) for name in sorted(pair))
            )
            if not alike:
                raise ValueError(
                    f"{checkpoint.folder}: config.json ties lm_head.weight to {embedding}, but they are packed apart; "
                    "set tie_word_embeddings to false there if the head is meant to be its own"
                )

    def _pack(
        self,
        found: Mapping[str, tuple[str, int]],
        schemes: Mapping[str, Scheme],
        assemblies: Mapping[str, Assembly],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        sources = self.checkpoint.sources
        order = sorted(found, key=lambda stored: (sources[stored].file, sources[stored].start))
        for file, names in itertools.groupby(order, key=lambda stored: sources[stored].file):
            with safe_open(file, framework="pt", device="cpu") as reader:
                for stored in names:
                    name, number = found[stored]
                    source, scheme = sources[stored], schemes[name]
                    for further, matrix in enumerate(own_matrices(name, source.shape, self._places[stored])):
                        values = partial(_read, reader, source, matrix, device, dtype)
                        try:
                            packed = pack_boxes(values, matrix.shape, matrix.boxes, scheme)
                        except ValueError as error:
                            where = f"{stored} of {self.checkpoint.folder} cannot be packed: {error}"
                            raise ValueError(where + _ADVICE * (scheme.values == TWO_OF_FOUR)) from None
                        assemblies[name].put(number + further, packed)


def _read(
    reader: object, stored: StoredTensor, matrix: OwnMatrix, device: torch.device, dtype: torch.dtype, box: Box
) -> Tensor:
    wanted = matrix.in_tensor(box)
    value = torch.empty([end - first for first, end in wanted], dtype=dtype, device=device)
    for rows, piece in weights.pieces(reader, stored, wanted):
        value[rows].copy_(piece)
    return value.view(value.shape[-2:])
