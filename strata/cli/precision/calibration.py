"""What commands that go through a model layer by layer share: calibration text, and an end that is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

Calibration = Annotated[
    Path | None, typer.Option(help="Text, JSONL or Parquet of texts or chats; else the built-in exercises.")
]
Samples = Annotated[int, typer.Option(help="Of the calibration text.", min=1)]
Length = Annotated[int, typer.Option(help="Most tokens of a sample.", min=2)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N: where layers are computed.")]


def sequences_of(folder: Path, calibration: Path | None, samples: int, length: int) -> list[list[int]]:
    """Token ids of the calibration text."""
    from strata.models.config import read_config
    from strata.text.tokenizer import Tokenizer
    from strata.train.data.calibration import exercise_samples, file_samples

    longest = min(length, read_config(folder).longest)
    with Tokenizer.load(folder) as tokenizer:
        if calibration is None:
            return exercise_samples(tokenizer, samples, longest)
        return file_samples(calibration, tokenizer, samples, longest)


def resolve_device(device: str) -> Any:
    """The `torch.device` of that name, "auto" being CUDA where there is one. Raises ValueError if it is not there."""
    from strata.engine.engine_config import device_of

    return device_of(device)


@contextmanager
def going_on(out: Path, console: Console) -> Iterator[None]:
    """An interruption of what writes `out` layer by layer says what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        from strata.models.quantized.calibrate.unfinished import unfinished_folder

        kept = unfinished_folder(out)
        if kept.exists():
            console.print(f"interrupted: {kept} keeps the shards that are there; the same command goes on with them")
        else:
            console.print("interrupted before the first shard: nothing is kept")
        raise
