"""A checkpoint folder becomes one with fewer bits, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from strata.kernels.quant.quantized import QuantizedWeight, join
from strata.models.batch import Batch
from strata.models.checkpoint import shorten
from strata.models.experts import has_joined_experts
from strata.models.joined import join_parameters
from strata.models.quantized.calibrate.compressed_tensors import quantization_config, stored_tensors
from strata.models.quantized.calibrate.layer import LayerRounding
from strata.models.quantized.calibrate.matrices import homes, is_skipped, layer_views, products
from strata.models.quantized.calibrate.rewrite import layer_tensors, open_floats, rewrite
from strata.models.quantized.calibrate.settings import Rounding
from strata.models.quantized.calibrate.stream import LayerStream

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
    refusal = "already (quantization_config); give the model in floats"
    stream, values = open_floats(folder, device, rounding.method, rounding.needs_text, sequences, refusal)
    given, rounding = rounding, _checked(stream, rounding)

    def change(number: int, batches: Sequence[Batch], hidden: Sequence[Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        work = LayerRounding(stream, number, rounding, batches, hidden)
        return _tensors(stream, number, work.run()), work.notes

    asked = asdict(rounding) | {"skip": list(rounding.skip)}
    config = quantization_config(rounding.packing, _ignored(stream, rounding))
    notes = rewrite(stream, out, asked, sequences, change, values | {"quantization_config": config}, report)
    if rounding.packing != given.packing:
        notes.append(
            f"groups have {rounding.group} columns: {given.packing.columns} divide not all widths of the model"
        )
    return notes


def _checked(stream: LayerStream, rounding: Rounding) -> Rounding:
    """With groups that divide the model's widths."""
    found = [matrix for number in range(stream.layers) for matrix in products(stream.model, number)]
    chosen = {matrix.name for matrix in found if not is_skipped(matrix, rounding.skip)}
    for pattern in rounding.skip:
        if not any(is_skipped(matrix, (pattern,)) for matrix in found):
            raise ValueError(
                f"skip = {pattern!r} fits no product; names are such as {shorten([m.name for m in found])}"
            )
    if not chosen:
        raise ValueError("no product is left to round")
    sizes = {matrix.name: matrix.shape for matrix in found}
    rounding = rounding.with_group({sizes[name][1] for name in chosen})
    packing = rounding.packing
    if packing.columns:  # of blocks too: activations are rounded in groups of as many columns
        uneven = [name for name in chosen if sizes[name][1] % packing.columns]
        if uneven:
            widths = ", ".join(sorted({str(sizes[name][1]) for name in uneven}))
            raise ValueError(
                f"groups of {packing.columns} columns do not divide {widths}, the widths of {shorten(sorted(uneven))}; "
                # Blocks are as the scheme says.
                + ("" if packing.rows > 1 else "give another --group, or ")
                + "leave them out with --skip"
            )
    for home, parts in homes(stream.model, found).items():
        if len({part in chosen for part in parts}) > 1:
            raise ValueError(f"{home} holds {', '.join(parts)} in one: skip all of them or none")
        if parts[0] in chosen and packing.rows > 1 and any(sizes[part][0] % packing.rows for part in parts[:-1]):
            raise ValueError(f"blocks of {packing.rows} rows would hold rows of two of {', '.join(parts)}; skip them")
    return rounding


def _tensors(stream: LayerStream, number: int, packed: dict[str, QuantizedWeight]) -> dict[str, Tensor]:
    """A layer as the checkpoint has it."""
    model = stream.model
    found: dict[str, Tensor] = {}
    for name, parts in homes(model, [one for one in products(model, number) if one.name in packed]).items():
        found |= stored_tensors(name, join([packed[part] for part in parts]) if len(parts) > 1 else packed[parts[0]])
    return found | layer_tensors(stream, number, packed.keys())


def _ignored(stream: LayerStream, rounding: Rounding) -> list[str]:
    """The modules with a matrix that stays as it is, in the order of the model."""
    model = stream.model
    found: dict[str, None] = {}
    for number in range(stream.layers):
        chosen = {one.name for one in products(model, number) if not is_skipped(one, rounding.skip)}
        left = {name: view for name, _, view in layer_views(model, number) if name not in chosen}
        matrices = {name: view for name, view in left.items() if view.dim() == 2 and name.endswith(".weight")}
        if has_joined_experts(model):  # a module without a name for each expert
            names = [re.sub(r"\.experts\..*", ".experts.weight", name) for name in matrices]
        else:
            names = list(join_parameters(model, matrices))
        found |= dict.fromkeys(name.removesuffix(".weight") for name in names)
    behind = [name for name, one in stream.behind.items() if len(one.shape) == 2 and name.endswith(".weight")]
    return [*found, _HEAD, *(name.removesuffix(".weight") for name in behind)]
