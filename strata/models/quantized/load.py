"""From a checkpoint folder, or from nothing, to a model whose products have packed weights, matrix by matrix."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from strata.kernels.quant.packed import PackedWeight, Scheme
from strata.models import weights
from strata.models.checkpoint import StoredTensor, read_checkpoint
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.initialize import dummy_values
from strata.models.layers import CausalLM
from strata.models.memory import require_memory
from strata.models.part import Box, ModelPart, boxes, held, pairs, whole
from strata.models.quantized.assembly import Assembly, assembly, meta_weights, numbered, pack_box, packed_box


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

    schemes: of the parameters that are to be packed; others than the part has are passed over. Values are rounded to
    `dtype` first, as they are in a model that is not packed. A part's scales are those of the whole matrix, so parts of
    any number of ranks stand for the same values. Memory: the packed weights, and one matrix in floats (of dummy
    weights, one parameter). Raises ValueError as `load` does, and for a parameter that its scheme cannot pack.
    """
    config, folder = weights.resolve(model, load_format)
    device = torch.device(device)
    dtype = weights.resolve_dtype(dtype, config, device)
    with torch.device("meta"):
        complete = build(config, max_length)
        made = complete if part is None else part.build(max_length)
    own = {name for name, _ in made.named_parameters()}
    schemes = {name: scheme for name, scheme in schemes.items() if name in own}
    reader = None if folder is None or load_format == "dummy" else _Folder(folder, config, complete, made, part)
    planned = meta_weights(made, complete, part, schemes)
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
            box = whole(shape) if part is None else part.box(name, shape)
            if name in schemes:
                taken = packed_box(box, shape, schemes[name])
                assemblies[name].put(number, pack_box(source[_slices(taken)], schemes[name], box, taken))
            else:
                held(target, box).copy_(source[_slices(box)])


class _Folder:
    """A checkpoint folder, checked against a model before anything is read."""

    def __init__(
        self, folder: Path, config: ModelConfig, complete: CausalLM, model: CausalLM, part: ModelPart | None
    ) -> None:
        self._folder, self._config, self._complete, self._model = folder, config, complete, model
        self._tensors = read_checkpoint(folder)
        self._sources = weights.match_tensors(complete, self._tensors, folder)
        self._places = boxes(model, part, {name: stored.shape for name, stored in self._sources.items()})

    def read(
        self,
        schemes: Mapping[str, Scheme],
        assemblies: Mapping[str, Assembly],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Fill the parameters that are not packed, then pack the others, each file by file."""
        sources = self._sources
        found = {stored: (name, number) for stored, name, number in numbered(self._model, schemes)}
        plain = {stored: box for stored, box in self._places.items() if stored not in found}
        weights.fill(self._model, sources, plain)
        weights.check_head(self._complete, self._config, self._tensors, self._folder, plain)
        order = sorted(found, key=lambda stored: (sources[stored].file, sources[stored].start))
        for file, names in itertools.groupby(order, key=lambda stored: sources[stored].file):
            with safe_open(file, framework="pt", device="cpu") as reader:
                for stored in names:
                    name, number = found[stored]
                    box, scheme = self._places[stored], schemes[name]
                    taken = packed_box(box, sources[stored].shape, scheme)
                    value = _read(reader, sources[stored], taken, device, dtype)
                    assemblies[name].put(number, pack_box(value, scheme, box, taken))


def _read(reader: object, stored: StoredTensor, box: Box, device: torch.device, dtype: torch.dtype) -> Tensor:
    value = torch.empty([end - first for first, end in box], dtype=dtype, device=device)
    for rows, piece in weights.pieces(reader, stored, box):
        value[rows].copy_(piece)
    return value


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, end) for first, end in box)
