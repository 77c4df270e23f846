"""Options that `serve` and `run-batch` share: what requests call the model, and how its answers are read."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from strata.files.json_object import read_object
from strata.serve.replies.tool_formats import format_in_template
from strata.text.tokenizer import read_templates

chat_option = partial(typer.Option, rich_help_panel="Chat")


class ToolCallFormat(StrEnum):
    """How a model writes tool calls, by vLLM's names."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"


TOOL_FORMATS = {ToolCallFormat.HERMES: "hermes", ToolCallFormat.LLAMA3_JSON: "llama3"}

ServedModelName = Annotated[
    list[str] | None, typer.Option(help="What requests may call it; may be repeated. [default: the model's name]")
]
ToolCalls = Annotated[
    ToolCallFormat | None, chat_option(help="How the model calls tools. [default: as its chat template says]")
]
Reasoning = Annotated[bool, chat_option(help="Tell <think>...</think> apart from the answer.")]


def served_names(given: list[str] | None, own: str) -> tuple[str, ...]:
    """What clients may call a model: what was given, or its own name. Raises ValueError for an empty name."""
    if given and not all(given):
        raise ValueError("--served-model-name is empty: give the name that clients ask for, or leave it out")
    return tuple(given or [own])


def tool_format(given: ToolCallFormat | None, tokenizer: str, chat_template: str | None = None) -> str | None:
    """How the model writes calls: as was given, or as the template does that it is asked with, its own or another."""
    if given is not None:
        return TOOL_FORMATS[given]
    if chat_template is None:
        folder = Path(tokenizer)
        templates = read_templates(folder, read_object(folder / "tokenizer_config.json"))
        chat_template = templates.get("tool_use", templates.get("default", ""))
    return format_in_template(chat_template)
