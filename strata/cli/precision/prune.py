"""`strata prune`: a checkpoint with zeros among its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from strata.models.pruned.report import Zeros

_MIB = 1 << 20


def prune(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, org/model of the Hugging Face cache, or builtin.")],
    out: Annotated[Path | None, typer.Option(help="The folder for the new checkpoint.")] = None,
    pattern: Annotated[str, typer.Option(help="2:4 (two zeros in each four columns) or unstructured.")] = "2:4",
    share: Annotated[float, typer.Option(help="Of weights that become zeros; unstructured.")] = 0.5,
    method: Annotated[str, typer.Option(help="sparsegpt, wanda or magnitude, which needs no text.")] = "sparsegpt",
    calibration: Calibration = None,
    samples: Samples = 128,
    length: Length = 512,
    count_activations: Annotated[
        bool, typer.Option("--count-activations", help="Only count small inputs of down projections; writes nothing.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Write a model with weights of its products set to zero, in floats, layer by layer; says what that saves.

    Head, embedding and routers stay as they are. Run again after an interruption, it goes on. A model of pattern 2:4
    is served compressed by strata serve --sparsity 2:4.

    Example: strata prune path/to/model --pattern 2:4 --calibration chats.jsonl --out path/to/model-2of4
    """
    from strata.models.pruned.prune import prune as write
    from strata.models.pruned.report import zeros_of
    from strata.models.pruned.settings import Pruning

    folder, console = model_folder(model), Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if count_activations:
        if out is not None:
            raise ValueError(f"--count-activations writes nothing, and --out {out} is given; leave out one of them")
        _count(folder, sequences_of(folder, calibration, samples, length), device, console)
        return
    if out is None:
        raise ValueError("--out is missing: the folder for the new checkpoint (or give --count-activations)")
    pruning = Pruning.of(pattern, share, method)
    sequences = sequences_of(folder, calibration, samples, length) if pruning.needs_text else []
    with going_on(out, console), progress(console, "shards") as report:
        notes = write(folder, out, pruning, sequences, resolve_device(device), report)
    for note in notes:
        console.print(note)
    for line in report_lines(zeros_of(out)):
        typer.echo(line)
    tokens = sum(map(len, sequences))
    console.print(f"{out}: {pattern} by {method}, {counted(tokens, 'token')} of calibration text")


def report_lines(found: Sequence[Zeros]) -> list[str]:
    """A table by kind of matrix, and what the zeros make faster."""
    width = max(len(one.kind) for one in found)
    lines = [f"{'matrices':{width}}  count    zeros  2:4 holds   MiB stored   MiB as 2:4"]
    for one in found:
        holds = f"{one.two_of_four} of {one.matrices}"
        stored, packed = one.nbytes / _MIB, one.quantized_bytes / _MIB
        lines.append(
            f"{one.kind:{width}}  {one.matrices:5}  {one.share:6.2%}  {holds:>9}  {stored:11.2f}  {packed:11.2f}"
        )
    everything = found[-1]
    if everything.two_of_four == everything.matrices:
        return [*lines, *_TWO_OF_FOUR]
    return [*lines, *_NOTHING]


_TWO_OF_FOUR = (
    "faster: with --sparsity 2:4 weights take 9/16 of the bytes, so decodes read less (CUDA); prompts gain nothing",
    "not faster: anything without that option, and the checkpoint on disk, which holds the zeros as floats",
)
_NOTHING = (
    "faster: nothing. Zeros without a pattern are multiplied like any others: dense kernels skip none, the checkpoint",
    "and memory hold each as a float; kernels for sparse matrices pay only where far more of the weights are zeros",
)


def _count(folder: Path, sequences: list[list[int]], device: str, console: Console) -> None:
    from strata.models.pruned.activations import THRESHOLDS, count_activations

    with progress(console, "layers") as report:
        found = count_activations(folder, sequences, resolve_device(device), report)
    heads = "".join(f"  < {share:4.0%} of row" for share in THRESHOLDS)
    typer.echo(f"inputs of down projections, {counted(sum(map(len, sequences)), 'token')}\nlayer   zeros{heads}")
    for one in found:
        shares = "".join(f"  {small / one.values:13.2%}" for small in one.small)
        typer.echo(f"{one.layer:5}  {one.zeros / one.values:6.2%}{shares}")
    typer.echo("no kernel skips them: counted, not used")
