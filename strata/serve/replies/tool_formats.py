"""How families of models write tool calls into their text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

# What OpenAI's API lets a function be called.
FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


ToolFormatName = Literal["hermes", "llama3"]


@dataclass(frozen=True)
class ToolFormat:
    """A call is `opening`, an object {"name": ..., arguments_key: {...}}, `closing`.

    separator: stands between calls, of which only the first then has an opening; "" if each has its own.
    opening_optional: an object right at the start of a reply is a call without its opening.
    sign: is found in the chat templates of models that write calls so.
    """

    name: ToolFormatName
    opening: str
    closing: str
    separator: str
    opening_optional: bool
    arguments_key: str
    sign: re.Pattern[str]


# What may stand in a template, and in the text of one that writes it within quotes.
_QUOTE, _SPACE = r'\\*"', r"(?:\s|\\n)*"

TOOL_FORMATS = {
    # Hermes 2 Pro and what follows it: Qwen 2.5, Qwen 3.
    "hermes": ToolFormat(
        "hermes",
        "<tool_call>",
        "</tool_call>",
        separator="",
        opening_optional=False,
        arguments_key="arguments",
        sign=re.compile(rf"<tool_call>{_SPACE}\{{{_SPACE}{_QUOTE}(?:name|arguments){_QUOTE}"),
    ),
    # Llama 3.1 to 3.3. Their tag is a special token, which the text leaves out.
    "llama3": ToolFormat(
        "llama3",
        "<|python_tag|>",
        "",
        separator=";",
        opening_optional=True,
        arguments_key="parameters",
        sign=re.compile(rf"{_QUOTE}parameters{_QUOTE}: dictionary of argument name and its value"),
    ),
}


def format_in_template(template: str) -> ToolFormatName | None:
    """The format in which a chat template has its model write calls; None if that cannot be told."""
    return next((one.name for one in TOOL_FORMATS.values() if one.sign.search(template)), None)
