"""`strata data --preview`: rows with the learned tokens marked, in colour or, where there is none, by {+signs+}."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from strata.train.data.preview import ShownDocument, ShownRow

# Characters of a part that are shown at each of its ends.
_SHOWN = 500
_LEARNED = "bold green"
# Control characters in data are shown; a terminal obeys them.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


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
