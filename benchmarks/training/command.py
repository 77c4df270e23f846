"""`strata bench train`: T6 and T7, tokens per second of training steps on each GPU, beside their floor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from strata.bench.result import writable
from strata.cli import options
from strata.cli.bench.options import Repeat, Report
from strata.cli.ending import explanation
from strata.cli.groups import grouped
from strata.models.folder import folder_shape_or_file


@grouped
def train(
    *,
    shape: Annotated[
        str,
        typer.Option(
            "--shape", "--model", help=f"A shape ({options.SHAPE_NAMES}) or a config.json; the weights are random."
        ),
    ] = "1B",
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a pack.")] = 2,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 8192,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a repetition.")] = 10,
    repeat: Repeat = 3,
    precision: Annotated[str, typer.Option(help="Of the layers' products: bf16, fp8-tensor, fp8-row.")] = "bf16",
    recompute: Annotated[
        str, typer.Option(help="What the backward pass computes again: none, operations, mlp, layers.")
    ] = "none",
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine, a GPU each; or start torchrun.")] = 1,
    layout: Annotated[
        str | None, typer.Option(help='Such as "shard=8,zero=2" or "pp=4,micro_batches=8"; auto if left out.')
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    offload: Annotated[bool, typer.Option(help="Masters and moments in host memory.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for small models.")] = "cuda",
    eager: Annotated[bool, typer.Option(help="Record no CUDA graph.")] = False,
    losses: Annotated[
        Path | None, typer.Option(help="Write the loss of every step to this file.", callback=writable)
    ] = None,
    kernels: Annotated[
        bool, typer.Option(help="Trace one more step: milliseconds of each kernel, and of exposed messages, in --json.")
    ] = False,
    to: Report,
) -> None:
    """T6 and T7: tokens per second of training on each GPU with float32 masters; MFU and memory beside.

    Examples: strata bench train --shape 1B --batch 2 --sequence 8192

    strata bench train --shape 8B --batch 1 --ranks 8 --layout shard=8,zero=2,micro_batches=2 --recompute operations
    """
    from benchmarks.training.speed import TrainingTest, measure
    from strata.train.launch import ended_at_once, launch

    source = folder_shape_or_file(shape)
    if ranks > 1 and "RANK" not in os.environ:
        raise typer.Exit(launch([sys.executable, "-m", "strata", *sys.argv[1:]], ranks))
    test = TrainingTest(
        source, batch, sequence, precision, recompute, layout, optimizer, offload=offload, records=not eager
    )
    with ended_at_once(explanation):
        found = measure(test, device, steps=steps, repeat=repeat, losses=losses, kernels=kernels)
    if found is not None:
        to.report(*found)
