"""`strata data`: tokenizes files once, for `strata tune`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from strata.train.data.tokenize import tokenize
from strata.train.tune import base_folder


def tokenize_data(
    files: Annotated[
        list[Path], typer.Argument(help="JSONL, Parquet or text files, or folders of them.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="The folder for the shards.", show_default=False)],
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template: a folder, or builtin.")] = "builtin",
    longest: Annotated[
        int | None,
        typer.Option(
            help="Split text after so many tokens, leave longer chats and preferences out.", show_default=False
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; as many as there are cores if not given.", show_default=False)
    ] = None,
    shard_mb: Annotated[int, typer.Option(help="Input that one shard is made of, in MB.", min=1)] = 64,
) -> None:
    """Tokenize files once into memory-mapped shards; run again after an interruption, it goes on.

    A record has "text", or "messages", or "prompt", "chosen" and "rejected".

    Example: strata data chats.jsonl --out runs/chats
    """
    console = Console(stderr=True, highlight=False)
    with Bar(TextColumn("shards"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("", total=None)
        index = tokenize(
            files,
            base_folder(model),
            out,
            longest=longest,
            workers=workers or os.cpu_count() or 1,
            bytes_per_shard=shard_mb * 10**6,
            report=lambda done, of: bar.update(task, completed=done, total=of),
        )
    documents, tokens, left_out = (
        sum(getattr(shard, name) for shard in index.shards) for name in ("documents", "tokens", "left_out")
    )
    console.print(f"{out}: {index.kind}, {documents:,} documents, {tokens:,} tokens, {left_out:,} records left out")
