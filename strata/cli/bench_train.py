"""`strata bench train`: T6, tokens per second of training steps on one GPU, beside their floor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strata.cli.bench_result import report
from strata.cli.bench_run import AsJson, Save


def train(
    shape: Annotated[str, typer.Option(help="A shape (1B) with random weights, or a config.json.")] = "1B",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 2,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a repetition.")] = 10,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 3,
    precision: Annotated[str, typer.Option(help="Of the layers' products: bf16, fp8-tensor, fp8-row.")] = "bf16",
    losses: Annotated[
        Path | None, typer.Option(help="Write the loss of every step to this file.", show_default=False)
    ] = None,
    kernels: Annotated[bool, typer.Option(help="Trace one more step: milliseconds of each kernel, in --json.")] = False,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """T6: tokens per second of training on one GPU with float32 masters and AdamW; MFU and memory beside.

    Example: strata bench train --shape 1B --batch 2 --sequence 8192
    """
    from strata.cli.train_speed import measure
    from strata.train.config import PRECISIONS

    if precision not in PRECISIONS:
        raise ValueError(f"--precision {precision} is not one of {', '.join(PRECISIONS)}")
    values, text = measure(
        shape, batch, sequence, precision, steps=steps, repeat=repeat, losses=losses, kernels=kernels
    )
    report(values, text, as_json=as_json, save=save)
