"""`strata quantize`: a checkpoint with fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from strata.cli.precision.calibration import (
    Calibration,
    Device,
    Length,
    Samples,
    going_on,
    resolve_device,
    sequences_of,
)
from strata.cli.progress import progress
from strata.models.folder import model_folder
from strata.text.counted import counted


def quantize(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, org/model of the Hugging Face cache, or builtin.")],
    out: Annotated[Path, typer.Option(help="The folder for the new checkpoint.")],
    scheme: Annotated[
        str,
        typer.Option(help="fp8, fp8_block, int8: activations too; int4, fp8_weights, int8_weights."),
    ] = "fp8",
    method: Annotated[
        str | None, typer.Option(help="rtn, gptq, awq or smoothquant; gptq for int4, smoothquant for int8, else rtn.")
    ] = None,
    calibration: Calibration = None,
    samples: Samples = 128,
    length: Length = 512,
    group: Annotated[
        int | None, typer.Option(help="Columns of int4 that share a scale; 128, or 64 or 32 that divide.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Products that stay, as '*.down_proj'; repeatable.")] = None,
    device: Device = "auto",
) -> None:
    """Write a model with its products rounded to fewer bits, as compressed-tensors, layer by layer.

    Head, embedding and routers stay as they are. Run again after an interruption, it goes on.

    Example: strata quantize path/to/model --scheme int4 --calibration chats.jsonl --out path/to/model-int4
    """
    from strata.models.quantized.calibrate.quantize import quantize as write
    from strata.models.quantized.calibrate.settings import Rounding

    rounding = Rounding.of(scheme, method, group, tuple(skip or ()))
    folder, console = model_folder(model), Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    sequences = []
    if rounding.needs_text or calibration is not None:
        sequences = sequences_of(folder, calibration, samples, length)
    with going_on(out, console), progress(console, "shards") as report:
        notes = write(folder, out, rounding, sequences, resolve_device(device), report)
    for note in notes:
        console.print(note)
    console.print(
        f"{out}: {scheme} by {rounding.method}, {counted(sum(map(len, sequences)), 'token')} of calibration text"
    )
