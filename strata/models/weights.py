"""From a checkpoint folder to a model on a device, tensor by tensor."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from strata.files.folders import why_no_folder
from strata.models.checkpoint import StoredTensor, read_checkpoint, shorten
from strata.models.config import DTYPES, ModelConfig, config_from_dict, read_config
from strata.models.experts import stored_name, stored_parameters, stored_views
from strata.models.families import build
from strata.models.initialize import randomize
from strata.models.joined import split_tensors
from strata.models.joined_experts import read_expert, split_experts
from strata.models.layers import CausalLM
from strata.models.memory import require_memory
from strata.models.part import Box, Boxes, ModelPart, boxes, held, randomize_part, whole
from strata.models.shapes import SHAPES

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Old checkpoints store the frequencies of the rotary embedding, which follow from config.json.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Rows are copied in pieces of about this size: what the host holds beyond the file's own pages.
_PIECE_BYTES = 64 * 2**20


def resolve(model: str | Path, load_format: str = "auto") -> tuple[ModelConfig, Path | None]:
    """The config of a model folder, and the folder; or the config of a shape of `SHAPES`, and None.

    load_format "auto" reads the folder's weights. "dummy" makes random ones, so a folder needs only a config.json and
    a name such as "8B" needs no folder. Where config.json gives no dtype, the weights do. Raises ValueError for
    anything else.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format = {load_format!r} is not supported; accepted are 'auto' and 'dummy'")
    folder = Path(model)
    if folder.is_dir():
        config = read_config(folder)
        if config.dtype is None and load_format == "auto":
            stored = (tensor.dtype for tensor in read_checkpoint(folder, packed=True).values())
            floats = (dtype for dtype in stored if dtype in (*DTYPES.values(), torch.float64))  # others are packed
            config = dataclasses.replace(config, dtype=next(floats, None))
        return config, folder
    if str(model) not in SHAPES:
        names = ", ".join(map(repr, SHAPES))
        raise ValueError(f"{why_no_folder(folder)}; give a folder, or for dummy weights {names}")
    if load_format != "dummy":
        raise ValueError(f"the shape {str(model)!r} has no weights; use load_format='dummy', or give a model folder")
    return config_from_dict(SHAPES[str(model)], str(model)), None


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that weights are loaded as.

    "auto" keeps bfloat16 and float16 checkpoints as they are; float32 (or unknown) stays so on the CPU and becomes
    bfloat16 on CUDA.
    """
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ValueError(f"dtype = {dtype!r} is not supported; accepted are 'auto', {', '.join(map(repr, DTYPES))}")
    if config.dtype in (torch.bfloat16, torch.float16):
        return config.dtype
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load(
    model: str | Path,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    load_format: str = "auto",
    max_length: int | None = None,
    seed: int = 0,
    part: ModelPart | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """The model of a folder (or, with dummy weights, of a named shape) on `device`, and its config.

    All headers are checked against the model before memory is allocated or a weight is read. Weights are streamed into
    place in pieces, so the host never holds more than the pages of one file and a piece. `load_format` as in
    `resolve`, `dtype` as in `resolve_dtype`, `max_length` as in `build`; `seed` is that of dummy weights. part: of the
    model that is wanted, whose boxes alone are read of each tensor; the config is the part's then.

    Raises ValueError for a missing or corrupt file; missing, unexpected or misshapen tensors; too little memory.
    """
    config, folder = resolve(model, load_format)
    device = torch.device(device)
    dtype = resolve_dtype(dtype, config, device)
    with torch.device("meta"):
        complete = build(config, max_length)
        made = complete if part is None else part.build(max_length)
    given = config if part is None else part.config
    if folder is None or load_format == "dummy":
        materialize(made, device, dtype)
        if part is None:
            randomize(made, seed)
        else:
            randomize_part(made, part, complete, seed)
        return made, given
    tensors = read_checkpoint(folder)
    sources = match_tensors(complete, tensors, folder)
    places = boxes(made, part, {name: stored.shape for name, stored in sources.items()})
    materialize(made, device, dtype)
    fill(made, sources, places)
    check_head(complete, config, tensors, folder, places)
    return made, given


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """What the parameters take as `dtype`, and the buffers as they are. The model may be on the meta device."""
    parameters = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return parameters + sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model that was built on the meta device memory on `device`, its parameters as `dtype`.

    The rotary table is filled, the parameters are not. Raises ValueError, before anything is allocated, if the model
    does not fit in the free memory.
    """
    require_memory(weight_bytes(model, dtype), device, dtype)
    allocate(model, device, dtype)


def allocate(model: nn.Module, device: torch.device, dtype: torch.dtype, without: Container[str] = ()) -> None:
    """As `materialize`, without a look at how much memory is free. without: parameters that stay without memory."""
    # Not `to_empty`, whose `empty_like` of a tensor on the meta device imports a package for symbolic algebra.
    model.to(dtype=dtype)
    left = {id(parameter) for name, parameter in model.named_parameters() if name in without}

    def with_memory(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in left else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    model._apply(with_memory)


def match_tensors(model: nn.Module, tensors: dict[str, StoredTensor], folder: Path) -> dict[str, StoredTensor]:
    """For each of the `stored_parameters` of `model` its tensor in the checkpoint.

    A tied head needs no tensor of its own, and its tensor may stand for the embedding's. Raises ValueError that names
    the tensors if some are missing, unexpected, or of another shape than config.json says.
    """
    wanted = stored_parameters(model)
    tensors = split_experts(model, wanted, split_tensors(model, wanted, tensors, folder), folder)
    tied, embedding = _HEAD not in wanted, stored_name(model, _EMBEDDING)
    names = {name: name for name in wanted}
    if tied and embedding not in tensors and _HEAD in tensors:
        names[embedding] = _HEAD
    if missing := [name for name in wanted if names[name] not in tensors]:
        raise ValueError(f"{folder} lacks tensors that its config.json calls for: {shorten(missing)}")
    known = {*names.values(), _HEAD} if tied else set(names.values())
    unexpected = [name for name in tensors if name not in known and not _DERIVED.fullmatch(name)]
    if isinstance(model, CausalLM):
        unexpected = [name for name in unexpected if not is_passed_over(model, name)]
    if unexpected:
        raise ValueError(f"{folder} has tensors that its config.json does not call for: {shorten(unexpected)}")
    misshapen = [
        f"{names[name]} is {list(tensors[names[name]].shape)}, expected {list(parameter.shape)}"
        for name, parameter in wanted.items()
        if tensors[names[name]].shape != tuple(parameter.shape)
    ]
    if misshapen:
        raise ValueError(f"{folder} has tensors of other shapes than its config.json says: {shorten(misshapen)}")
    return {name: tensors[names[name]] for name in wanted}


def is_passed_over(model: CausalLM, name: str) -> bool:
    """Whether a tensor of a checkpoint is of layers that predict further tokens (MTP), which no graph runs."""
    at = _LAYER.match(name) if model.has_layers_behind else None
    return (at is not None and int(at[1]) >= len(model.model.layers)) or name.startswith(model.passed_over)


def stored_values(model: CausalLM, folder: Path, wanted: Container[str]) -> Iterator[tuple[str, Tensor]]:
    """The `wanted` parameters one after another, whole, in float32 on the CPU, from a checkpoint folder.

    model: of the folder's config, whole; it may be on the meta device. Raises ValueError as `load` does.
    """
    sources = match_tensors(model, read_checkpoint(folder), folder)
    for name, parameter in model.named_parameters():
        if name not in wanted:
            continue
        value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        for stored, view in stored_views(model, name, value):
            with safe_open(sources[stored].file, framework="pt", device="cpu") as reader:
                for rows, piece in pieces(reader, sources[stored], whole(sources[stored].shape)):
                    view[rows].copy_(piece)
        yield name, value


@torch.no_grad()
def fill(model: nn.Module, sources: dict[str, StoredTensor], places: dict[str, Boxes]) -> None:
    """Copy of every tensor that has boxes these to its parameter, file by file and in the order of the file."""
    parameters = stored_parameters(model)
    order = sorted(places, key=lambda name: (sources[name].file, sources[name].start))
    for file, names in itertools.groupby(order, key=lambda name: sources[name].file):
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in names:
                for box, target in held(parameters[name], places[name]):
                    for rows, piece in pieces(reader, sources[name], box):
                        target[rows].copy_(piece)


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


def check_head(
    complete: CausalLM, config: ModelConfig, tensors: dict[str, StoredTensor], folder: Path, places: dict[str, Boxes]
) -> None:
    """Raises ValueError if config.json ties the head to the embedding and the checkpoint stores another one; places:
    of the boxes that are read."""
    embedding = stored_name(complete, _EMBEDDING)
    if config.tied and _HEAD in tensors and embedding in tensors and embedding in places:
        for box in places[embedding]:
            _check_tie(tensors, embedding, folder, box)


def _check_tie(tensors: dict[str, StoredTensor], embedding_name: str, folder: Path, box: Box) -> None:
    """config.json ties the head to the embedding: a head that is stored all the same must be equal to it, in the box
    that is read."""
    head, embedding = tensors[_HEAD], tensors[embedding_name]
    equal = head.shape == embedding.shape and head.dtype == embedding.dtype
    if equal:
        with safe_open(head.file, framework="pt") as heads, safe_open(embedding.file, framework="pt") as embeddings:
            pairs = zip(pieces(heads, head, box), pieces(embeddings, embedding, box), strict=True)
            equal = all(torch.equal(one, other) for (_, one), (_, other) in pairs)
    if not equal:
        raise ValueError(
            f"{folder}: config.json ties {_HEAD} to {embedding_name}, but they differ; "
            "set tie_word_embeddings to false there if the head is meant to be its own"
        )
