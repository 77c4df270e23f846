"""A checkpoint folder becomes one with fewer bits, layer by layer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata.files.json_object import read_existing_object
from strata.kernels.quant.packed import PackedWeight, join
from strata.models.batch import Batch
from strata.models.checkpoint import shorten
from strata.models.experts import SparseCausalLM, stored_views
from strata.models.joined import join_parameters
from strata.models.quantized.calibrate.compressed_tensors import quantization_config, stored_tensors
from strata.models.quantized.calibrate.layer import LayerRounding
from strata.models.quantized.calibrate.matrices import homes, is_skipped, layer_prefix, layer_views, products
from strata.models.quantized.calibrate.settings import Rounding
from strata.models.quantized.calibrate.stream import LayerStream, batches_of
from strata.models.quantized.calibrate.unfinished import Unfinished
from strata.models.save import copy_tokenizer, write_json
from strata.models.weights import stored_values

_HEAD = "lm_head"


def quantize(
    folder: Path,
    out: Path,
    rounding: Rounding,
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> list[str]:
    """Write the model of `folder` to `out` with its products rounded, as compressed-tensors; returns notes for users.

    sequences: token ids of calibration text; none: round to nearest by the weights alone. In memory are one layer in
    float32, the activations of the text, and of GPTQ a matrix [width, width] for each kind of input of a layer. What is
    finished is kept beside `out` when this is stopped; called again alike it goes on, and the bytes are the same.
    report: called with the number of finished shards and of all. Raises ValueError, before weights are read, for a
    model that is packed already, a group that does not divide, patterns of `skip` that fit nothing, `out` that exists,
    or a method without its text.
    """
    values = read_existing_object(folder / "config.json")
    if values.get("quantization_config") is not None:
        raise ValueError(f"{folder} is quantized already (quantization_config); give the model in floats")
    if rounding.needs_text and not any(len(sequence) for sequence in sequences):
        raise ValueError(f"method = {rounding.method!r} needs calibration text, and there is none")
    stream = LayerStream(folder, device)
    _check(stream, rounding)
    worst = max((max(sequence, default=0) for sequence in sequences), default=0)
    if worst >= stream.config.vocab_size:
        raise ValueError(f"the calibration text has token {worst}, and the model {stream.config.vocab_size} tokens")
    batches = batches_of([sequence for sequence in sequences if len(sequence)]) if sequences else []
    others = [name for name, _ in stream.model.named_parameters() if not name.startswith("model.layers.")]
    settings = _settings(stream, rounding, sequences)
    with Unfinished(out, settings, stream.layers + len(others)) as unfinished:
        report(unfinished.done, unfinished.shards)
        hidden = _hidden(stream, batches, unfinished)
        for number in range(unfinished.done, stream.layers):
            hidden = _write_layer(stream, number, rounding, batches, hidden, unfinished)
            report(unfinished.done, unfinished.shards)
        for name in others[unfinished.done - stream.layers :]:
            unfinished.add(_others(stream, name), [])
            report(unfinished.done, unfinished.shards)
        if (folder / "tokenizer.json").is_file():
            copy_tokenizer(folder, unfinished.folder)
        config = quantization_config(rounding.packing, _ignored(stream, rounding))
        write_json(unfinished.folder / "config.json", values | {"quantization_config": config})
        unfinished.finish()
        return [note for notes in unfinished.notes for note in notes]


def _check(stream: LayerStream, rounding: Rounding) -> None:
    found = [matrix for number in range(stream.layers) for matrix in products(stream.model, number)]
    chosen = {matrix.name for matrix in found if not is_skipped(matrix, rounding.skip)}
    for pattern in rounding.skip:
        if not any(is_skipped(matrix, (pattern,)) for matrix in found):
            raise ValueError(
                f"skip = {pattern!r} fits no product; names are such as {shorten([m.name for m in found])}"
            )
    if not chosen:
        raise ValueError("no product is left to round")
    packing, sizes = rounding.packing, {matrix.name: matrix.shape for matrix in found}
    if packing.columns:  # of blocks too: activations are rounded in groups of as many columns
        uneven = [name for name in chosen if sizes[name][1] % packing.columns]
        if uneven:
            widths = ", ".join(sorted({str(sizes[name][1]) for name in uneven}))
            raise ValueError(
                f"groups of {packing.columns} columns do not divide {widths}, the widths of {shorten(sorted(uneven))}; "
                "give another --group, or leave them out with --skip"
            )
    for home, parts in homes(stream.model, found).items():
        if len({part in chosen for part in parts}) > 1:
            raise ValueError(f"{home} holds {', '.join(parts)} in one: skip all of them or none")
        if parts[0] in chosen and packing.rows > 1 and any(sizes[part][0] % packing.rows for part in parts[:-1]):
            raise ValueError(f"blocks of {packing.rows} rows would hold rows of two of {', '.join(parts)}; skip them")


def _settings(stream: LayerStream, rounding: Rounding, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What the bytes of the result follow from."""
    files = sorted({stored.file for stored in stream.sources.values()})
    states = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    text = hashlib.sha256(json.dumps([list(sequence) for sequence in sequences]).encode()).hexdigest()
    asked = asdict(rounding) | {"skip": list(rounding.skip)}
    return asked | {
        "model": str(stream.folder.resolve()),
        "weights": states,
        "text": text,
        "device": stream.device.type,
    }


def _hidden(stream: LayerStream, batches: Sequence[Batch], unfinished: Unfinished) -> list[Tensor]:
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
    rounding: Rounding,
    batches: Sequence[Batch],
    hidden: Sequence[Tensor],
    unfinished: Unfinished,
) -> list[Tensor]:
    """Round a layer and write its shard; returns what it makes of the text."""
    with stream.opened(number):
        work = LayerRounding(stream, number, rounding, batches, hidden)
        packed = work.run()
        tensors = _tensors(stream, number, packed)
        made = [stream.run(number, batch, x).cpu() for batch, x in zip(batches, hidden, strict=True)]
        kept = {_batch_name(place): x for place, x in enumerate(made)}
        unfinished.add(tensors, work.notes, kept if batches and number + 1 < stream.layers else None)
    return made


def _batch_name(place: int) -> str:
    return f"batch.{place:05}"


def _tensors(stream: LayerStream, number: int, packed: dict[str, PackedWeight]) -> dict[str, Tensor]:
    """A layer as the checkpoint has it."""
    model = stream.model
    found: dict[str, Tensor] = {}
    for name, parts in homes(model, [one for one in products(model, number) if one.name in packed]).items():
        found |= stored_tensors(name, join([packed[part] for part in parts]) if len(parts) > 1 else packed[parts[0]])
    if isinstance(model, SparseCausalLM) and model.expert_names.joined:
        layer = model.model.layers[number]
        values = {layer_prefix(number) + own: parameter.detach() for own, parameter in layer.named_parameters()}
    else:
        values = {name: view for name, _, view in layer_views(model, number)}
    plain = {name: value.to(_dtype(stream, name)) for name, value in values.items() if name not in packed}
    return found | join_parameters(model, plain)


def _others(stream: LayerStream, name: str) -> dict[str, Tensor]:
    ((_, value),) = stored_values(stream.model, stream.folder, (name,))
    return {stored: one.to(_dtype(stream, stored)) for stored, one in stored_views(stream.model, name, value)}


def _dtype(stream: LayerStream, name: str) -> torch.dtype:
    """In which a tensor is stored."""
    if name in stream.sources:
        return stream.sources[name].dtype
    return stream.config.dtype or torch.float32


def _ignored(stream: LayerStream, rounding: Rounding) -> list[str]:
    """The modules with a matrix that stays as it is, in the order of the model."""
    model = stream.model
    found: dict[str, None] = {}
    for number in range(stream.layers):
        chosen = {one.name for one in products(model, number) if not is_skipped(one, rounding.skip)}
        left = {name: view for name, _, view in layer_views(model, number) if name not in chosen}
        matrices = {name: view for name, view in left.items() if view.dim() == 2 and name.endswith(".weight")}
        if _in_one(stream):  # a module without a name for each expert
            names = [re.sub(r"\.experts\..*", ".experts.weight", name) for name in matrices]
        else:
            names = list(join_parameters(model, matrices))
        found |= dict.fromkeys(name.removesuffix(".weight") for name in names)
    return [*found, _HEAD]


def _in_one(stream: LayerStream) -> bool:
    return isinstance(stream.model, SparseCausalLM) and stream.model.expert_names.joined
