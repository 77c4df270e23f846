"""`strata data`: tokenizes files, or the exercises of the built-in model, once, for training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from strata.cli.progress import progress
from strata.models.folder import existing_folder
from strata.text.counted import counted
from strata.train.data.preview import ShownDocument, ShownRow
from strata.train.data.preview import preview as preview_rows
from strata.train.data.shards import ShardIndex
from strata.train.data.tokenize import tokenize
from strata.train.tasks.exercises import write_exercises

Workers = Annotated[int | None, typer.Option(help="Processes; as many as there are cores if not given.", min=1)]
Out = Annotated[Path, typer.Option(help="The folder for the shards.")]
# Characters of a part that are shown at each of its ends.
_SHOWN = 500
_LEARNED = "bold green"
# Control characters in data are shown; a terminal obeys them.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class _FilesUnlessNamed(TyperGroup):
    """What names no sub-command are the arguments of `files`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["files", *args])


command = typer.Typer(
    cls=_FilesUnlessNamed, add_completion=False, rich_markup_mode="rich", no_args_is_help=True,
    context_settings={"ignore_unknown_options": True},
)  # fmt: skip


@command.callback()
def data() -> None:
    """Tokenize data once into memory-mapped shards; run again after an interruption, it goes on.

    `strata data FILES --out FOLDER` is short for `strata data files FILES --out FOLDER`.

    FILES are .jsonl (a JSON object a line), .json (an array of them), .parquet,
    .txt or .md, or folders of these. An object is a chat, a preference or a text:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}

    {"conversations": [{"from": "human", "value": "Hi"}, ...]} (ShareGPT)

    {"instruction": "Add", "input": "1, 2", "output": "3"} (Alpaca)

    {"prompt": "Hi", "completion": "Hello"}

    {"prompt": "Hi", "chosen": "Hello", "rejected": "What"}

    {"text": "Once upon a time"}

    Of chats the assistant's turns are learned, but those of "weight": 0 (OpenAI),
    "train": false (axolotl) and "loss": false (ms-swift).

    Example: strata data chats.jsonl --preview

    Example: strata data chats.jsonl --out runs/chats
    """


@command.command()
def files(
    files: Annotated[list[Path], typer.Argument(help="JSONL, JSON arrays, Parquet or text files, or folders of them.")],
    out: Annotated[Path | None, typer.Option(help="The folder for the shards.")] = None,
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template: a folder, or builtin.")] = "builtin",
    longest: Annotated[
        int | None, typer.Option(help="Split text after so many tokens, leave longer chats and preferences out.")
    ] = None,
    workers: Workers = None,
    shard_mb: Annotated[int, typer.Option(help="Input that one shard is made of, in MB.", min=1)] = 64,
    preview: Annotated[
        bool, typer.Option("--preview", help="Print rows with the learned tokens marked, and write nothing.")
    ] = False,
    rows: Annotated[int | None, typer.Option(help="How many rows --preview prints; 3 if left out.", min=1)] = None,
) -> None:
    """Tokenize files of records: texts, chats, Alpaca's rows, TRL's prompt and completion or preferences, ShareGPT's
    conversations.

    Example: strata data chats.jsonl --out runs/chats
    """
    if preview:
        shown = preview_rows(files, existing_folder(model), rows=rows or 3, longest=longest)
        print_preview(shown, Console(highlight=False))
        return
    if rows is not None:
        raise ValueError("--rows is for --preview: give both, or leave it out")
    if out is None:
        raise ValueError("give a folder for the shards, --out FOLDER, or --preview, which writes nothing")
    folder = out

    def write(report: Callable[[int, int], None]) -> ShardIndex:
        return tokenize(
            files,
            existing_folder(model),
            folder,
            longest=longest,
            workers=workers or os.cpu_count() or 1,
            bytes_per_shard=shard_mb * 10**6,
            report=report,
        )

    _show(folder, write)


@command.command()
def exercises(
    out: Out,
    documents: Annotated[int, typer.Option(help="How many; 85 tokens each on average.", min=1)],
    workers: Workers = None,
    seed: Annotated[int, typer.Option(help="Document i is a function of seed and i.")] = 0,
    vocab_size: Annotated[int, typer.Option(help="Tokens of the tokenizer, which is made from the exercises.")] = 4096,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The folder of a tokenizer that `strata data exercises` has made.")
    ] = None,
) -> None:
    """Generate the exercises of the built-in model, and their tokenizer in the folder `tokenizer` of the output.

    Example: strata data exercises --out runs/builtin/data --documents 6000000
    """

    def write(report: Callable[[int, int], None]) -> ShardIndex:
        return write_exercises(
            out,
            documents,
            tokenizer_folder=tokenizer,
            seed=seed,
            vocab_size=vocab_size,
            workers=workers or os.cpu_count() or 1,
            report=report,
        )

    _show(out, write)


def _show(out: Path, write: Callable[[Callable[[int, int], None]], ShardIndex]) -> None:
    """Write, with a bar of what is done; then what there is."""
    console = Console(stderr=True, highlight=False)
    with progress(console, "written") as report:
        index = write(report)
    documents, tokens, left_out = (
        sum(getattr(shard, name) for shard in index.shards) for name in ("documents", "tokens", "left_out")
    )
    console.print(
        f"{out}: {index.kind}, {counted(documents, 'document')}, {counted(tokens, 'token')}, "
        f"{counted(left_out, 'record')} left out"
    )


def print_preview(rows: Iterable[ShownRow], console: Console) -> None:
    """Print each row as it comes, with how many of its tokens are learned."""
    in_colour = console.color_system is not None and not console.no_color
    how = "in bold green" if in_colour else "between {+ and +}"
    for number, row in enumerate(rows):
        if not number:
            _print(console, Text(f"{row.kind}; what is learned stands {how}\n"))
        if not row.documents:
            _print(console, Text(f"{row.where}: left out: too long, empty, or marked as not to be learned\n", "yellow"))
        for at, document in enumerate(row.documents):
            _print(console, Text(f"{row.where}{_which(row, at)}: {_counts(document)}", "bold"))
            _print(console, _marked(document, in_colour).append("\n"))


def _print(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)


def _which(row: ShownRow, at: int) -> str:
    if row.kind == "preference":
        return f", {('chosen', 'rejected')[at]}"
    return f", document {at + 1} of {len(row.documents)}" if len(row.documents) > 1 else ""


def _counts(document: ShownDocument) -> str:
    return f"{document.tokens:,} tokens, {document.learned:,} learned"


def _marked(document: ShownDocument, in_colour: bool) -> Text:
    text = Text()
    for part, is_learned in document.parts:
        cut = _cut(part).translate(_VISIBLE)
        if is_learned and not in_colour:
            cut = f"{{+{cut}+}}"
        text.append(cut, _LEARNED if is_learned else None)
    return text


def _cut(part: str) -> str:
    left_out = len(part) - 2 * _SHOWN
    return part if left_out <= 0 else f"{part[:_SHOWN]} ... {left_out:,} characters ... {part[-_SHOWN:]}"
