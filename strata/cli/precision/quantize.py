"""`strata quantize`: a checkpoint with fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from strata.models.folder import model_folder


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
    calibration: Annotated[
        Path | None, typer.Option(help="Text, JSONL or Parquet of texts or chats; else the built-in exercises.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Of the calibration text.", min=1)] = 128,
    length: Annotated[int, typer.Option(help="Most tokens of a sample.", min=2)] = 512,
    group: Annotated[int | None, typer.Option(help="Columns of int4 that share a scale; 128 if left out.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Products that stay, as '*.down_proj'; repeatable.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N: where layers are computed.")] = "auto",
) -> None:
    """Write a model with its products rounded to fewer bits, as compressed-tensors, layer by layer.

    Head, embedding and routers stay as they are. Run again after an interruption, it goes on.

    Example: strata quantize path/to/model --scheme int4 --calibration chats.jsonl --out path/to/model-int4
    """
    import torch

    from strata.models.quantized.calibrate.quantize import quantize as write
    from strata.models.quantized.calibrate.settings import Rounding

    rounding = Rounding.of(scheme, method, group, tuple(skip or ()))
    folder = model_folder(model)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    sequences = []
    if rounding.needs_text or calibration is not None:
        sequences = _sequences(folder, calibration, samples, length)
    console = Console(stderr=True, highlight=False)
    columns: list[Any] = [TextColumn("shards"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()]
    bar = Bar(*columns, console=console)
    task = bar.add_task("", total=None)

    def report(done: int, of: int) -> None:
        bar.start()  # not before: what cannot begin at all is a message without a bar
        bar.update(task, completed=done, total=of)

    try:
        notes = write(folder, out, rounding, sequences, torch.device(device), report)
    finally:
        if bar.live.is_started:
            bar.stop()
    for note in notes:
        console.print(note)
    console.print(f"{out}: {scheme} by {rounding.method}, {sum(map(len, sequences)):,} tokens of calibration text")


def _sequences(folder: Path, calibration: Path | None, samples: int, length: int) -> list[list[int]]:
    """Token ids of the calibration text."""
    from strata.models.config import read_config
    from strata.text.tokenizer import Tokenizer
    from strata.train.data.calibration import exercise_samples, file_samples

    longest = min(length, read_config(folder).longest)
    with Tokenizer.load(folder) as tokenizer:
        if calibration is None:
            return exercise_samples(tokenizer, samples, longest)
        return file_samples(calibration, tokenizer, samples, longest)
