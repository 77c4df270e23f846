"""A checkpoint folder becomes another, layer by layer, and goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strata.files.json_object import read_existing_object
from strata.models.batch import Batch
from strata.models.checkpoint import StoredTensor
from strata.models.experts import stored_views
from strata.models.joined import join_parameters, stored_values
from strata.models.quantized.calibrate.matrices import layer_prefix
from strata.models.quantized.calibrate.stream import LayerStream, batches_of
from strata.models.quantized.calibrate.unfinished import UnfinishedFolder
from strata.models.quantized.checkpoint import is_quantized_folder
from strata.models.save import copy_companions, runs, write_json

# Of a layer's number, the text and what enters the layer, which is opened: changes it in place so that it makes what
# the new one will; returns its tensors as they are stored, and notes for users.
Change = Callable[[int, Sequence[Batch], Sequence[Tensor]], tuple[dict[str, Tensor], list[str]]]
# Of shards of layers that predict further tokens, which are copied.
_SHARD_BYTES = 2**30


def open_floats(
    folder: Path, device: torch.device, method: str, needs_text: bool, sequences: Sequence[Sequence[int]], refusal: str
) -> tuple[LayerStream, dict[str, Any]]:
    """The model of a folder, which must be in floats, and the contents of its config.json. Raises ValueError with
    `refusal` for a packed one, and for a method without its text."""
    values = read_existing_object(folder / "config.json")
    if is_quantized_folder(folder, values):
        raise ValueError(f"{folder} is quantized {refusal}")
    if needs_text and not any(len(sequence) for sequence in sequences):
        raise ValueError(f"method = {method!r} needs calibration text, and there is none")
    return LayerStream(folder, device), values


def rewrite(
    stream: LayerStream,
    out: Path,
    asked: dict[str, Any],
    sequences: Sequence[Sequence[int]],
    change: Change,
    config: dict[str, Any],
    report: Callable[[int, int], None],
) -> list[str]:
    """Write the model of a stream to `out`, its layers changed; returns the notes of all layers. Layers that predict
    further tokens are copied.

    asked: what the change follows from, beside the model and the text. sequences: token ids of calibration text; may be
    none. config: of the new config.json. What is finished is kept beside `out` when this is stopped; called again alike
    it goes on, and the bytes are the same. report: called with the number of finished shards and of all. Raises
    ValueError, before weights are read, for tokens that the model does not have, for more of them in a sequence than it
    takes, and for `out` that exists.
    """
    stream.check_tokens(sequences)
    batches = batches_of([sequence for sequence in sequences if len(sequence)]) if sequences else []
    others = [name for name, _ in stream.model.named_parameters() if not name.startswith("model.layers.")]
    behind = _pieces(stream.behind)
    shards = stream.layers + len(others) + len(behind)
    with UnfinishedFolder(out, asked | _sources(stream, sequences), shards) as unfinished:
        report(unfinished.done, unfinished.shards)
        hidden = _hidden(stream, batches, unfinished)
        for number in range(unfinished.done, stream.layers):
            hidden = _write_layer(stream, number, change, batches, hidden, unfinished)
            report(unfinished.done, unfinished.shards)
        for name in others[unfinished.done - stream.layers :]:
            unfinished.add(_others(stream, name), [])
            report(unfinished.done, unfinished.shards)
        for piece in behind[unfinished.done - stream.layers - len(others) :]:
            unfinished.add({one.name: _as_stored(one) for one in piece}, [])
            report(unfinished.done, unfinished.shards)
        copy_companions(stream.folder, unfinished.folder)
        write_json(unfinished.folder / "config.json", config)
        unfinished.finish()
        return [note for notes in unfinished.notes for note in notes]


def layer_tensors(stream: LayerStream, number: int, without: Collection[str] = ()) -> dict[str, Tensor]:
    """An opened layer as the checkpoint has it, but for the tensors `without`."""
    layer, prefix = stream.model.model.layers[number], layer_prefix(number)
    values = stored_values(stream.model, ((prefix + own, one.detach()) for own, one in layer.named_parameters()))
    plain = {name: value.to(stored_dtype(stream, name)) for name, value in values if name not in without}
    return join_parameters(stream.model, plain)


def stored_dtype(stream: LayerStream, name: str) -> torch.dtype:
    """In which a tensor is stored."""
    if name in stream.sources:
        return stream.sources[name].dtype
    return stream.config.dtype or torch.float32


def _sources(stream: LayerStream, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the bytes of the result follow from, beside what is asked."""
    files = sorted({stored.file for stored in (*stream.sources.values(), *stream.behind.values())})
    return {
        "model": str(stream.folder.resolve()),
        "config": hashlib.sha256((stream.folder / "config.json").read_bytes()).hexdigest(),
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
        "text": hashlib.sha256(json.dumps([list(sequence) for sequence in sequences]).encode()).hexdigest(),
        "device": stream.device.type,
    }


def _hidden(stream: LayerStream, batches: Sequence[Batch], unfinished: UnfinishedFolder) -> list[Tensor]:
    """What enters the first layer that is not done."""
    if not batches or unfinished.done >= stream.layers:
        return []
    if not unfinished.done:
        return stream.embed(batches)
    kept = unfinished.hidden()
    return [kept[_batch_name(place)] for place in range(len(batches))]


def _write_layer(
    stream: LayerStream,
    number: int,
    change: Change,
    batches: Sequence[Batch],
    hidden: Sequence[Tensor],
    unfinished: UnfinishedFolder,
) -> list[Tensor]:
    """Change a layer and write its shard; returns what it makes of the text."""
    with stream.opened(number):
        tensors, notes = change(number, batches, hidden)
        made = [stream.run(number, batch, x).cpu() for batch, x in zip(batches, hidden, strict=True)]
        kept = {_batch_name(place): x for place, x in enumerate(made)}
        unfinished.add(tensors, notes, kept if batches and number + 1 < stream.layers else None)
    return made


def _batch_name(place: int) -> str:
    return f"batch.{place:05}"


def _others(stream: LayerStream, name: str) -> dict[str, Tensor]:
    ((_, value),) = stream.checkpoint.parameters(stream.model, (name,))
    return {stored: one.to(stored_dtype(stream, stored)) for stored, one in stored_views(stream.model, name, value)}


def _pieces(tensors: Mapping[str, StoredTensor]) -> list[list[StoredTensor]]:
    return runs(tensors.values(), lambda one: math.prod(one.shape) * one.dtype.itemsize, _SHARD_BYTES)


def _as_stored(stored: StoredTensor) -> Tensor:
    with safe_open(stored.file, framework="pt", device="cpu") as reader:
        tensor: Tensor = reader.get_tensor(stored.name)
    return tensor
