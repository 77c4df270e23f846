"""The process that renders chat templates: one of its own, since a template is foreign code that may never end.

It is run by `strata.text.chat_template`: {"template", "variables", "max_characters"} gives {"text"} or {"error"}.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from strata.text.killable_worker import serve_answers

MEMORY_BYTES = 2**30
MAX_ERROR_CHARACTERS = 1000


class GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant said, for training masks; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 (the attribute is jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class GuardedNamespace(Namespace):
    """jinja's `namespace` without underscore names, which lead to the internals of Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: `namespace(self=...)` is legal
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_internal(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        super().__setitem__(name, value)


class DictMaker:
    """What templates call as `dict`: makes dictionaries, but is not the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class CallArguments(dict[str, Any]):
    """The arguments of a call: an object to templates that read or write one, and its JSON where a template puts them
    into a text, as DeepSeek's do with what in OpenAI's messages is a text.
    """

    def __str__(self) -> str:
        return _tojson(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _refuse_internal(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which models have not seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sandbox() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )


def check_syntax(source: str) -> None:
    """Raise jinja's TemplateSyntaxError for what is no template. Computes nothing, unlike `compile_template`, which
    folds constants and may take any time and memory for it: that is for a process that can be killed.
    """
    _sandbox().parse(source)


@lru_cache(maxsize=8)
def compile_template(source: str) -> Template:
    """The template in the sandbox and with the names that transformers offers to chat templates."""
    environment = _sandbox()
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda layout: datetime.now().strftime(layout),
        namespace=GuardedNamespace,
        dict=DictMaker(),
    )
    return environment.from_string(source)


def _set_arguments(variables: dict[str, Any]) -> None:
    for message in variables["messages"]:
        for call in message.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], dict):
                call["function"]["arguments"] = CallArguments(call["function"]["arguments"])


def render(source: str, variables: dict[str, Any], max_characters: int) -> str:
    _set_arguments(variables)
    parts = []
    characters = 0
    for part in compile_template(source).generate(variables):
        characters += len(part)
        if characters > max_characters:
            raise TemplateError(f"its output is longer than {max_characters} characters")
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render(request["template"], request["variables"], request["max_characters"])}
    except TemplateSyntaxError as error:
        return {"error": f"syntax error in line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except TemplateError as error:
        return {"error": str(error)[:MAX_ERROR_CHARACTERS]}
    except Exception as error:  # whatever the foreign code raised is its own fault and must not end the worker
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}


if __name__ == "__main__":
    serve_answers(answer, MEMORY_BYTES)
