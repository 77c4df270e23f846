"""What a reply must follow, as a grammar: from a request's `response_format` or its tools, checked before use."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from strata.engine.grammars.structured_outputs import StructuredOutputsParams, join_entries, json_entry, read_schema
from strata.serve.fair_queue import AT_ONCE, FairQueue
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.http.validation import shown
from strata.serve.replies.tool_formats import TOOL_FORMATS, ToolFormatName
from strata.serve.schema.responses import ResponsesSchemaFormat
from strata.serve.schema.structured import (
    FormatFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    TextFormat,
)
from strata.text.async_worker import AsyncWorker

MAX_BYTES = 64 * 1024
# Of what is made of it: formats of strings become patterns of up to 1000 characters, rules of a grammar what they call.
MAX_MADE_BYTES = 4 * MAX_BYTES
# Containers within containers; a property of an object is two deeper than the object.
MAX_DEPTH = 64

# Characters of a grammar that is given as text: GBNF is translated here, at about 10 ms for 1000.
MAX_GRAMMAR = 16 * 1024

_MAX_REMEMBERED = 256
_MAX_ANSWER = 16 * 1024


@dataclass(frozen=True)
class Grammar:
    """A grammar of llguidance, the first of whose parts it begins with, and the field of the request that it was made
    from, which errors name.
    """

    parts: tuple[Mapping[str, Any], ...]
    param: str

    @cached_property
    def text(self) -> str:
        return join_entries(*self.parts)

    @classmethod
    def json_object(cls, param: str) -> Grammar:
        """Any JSON object."""
        return cls.from_json_schema({"type": "object"}, param)

    @classmethod
    def from_json_schema(cls, schema: Any, param: str) -> Grammar:
        """JSON that follows `schema`. Raises ApiError 400 if it is no object or nested too deep.

        Whether the schema can be enforced tells `GrammarChecker`.
        """
        _check_schemas([schema], param)
        return cls((_json_part("json", schema, param),), param)

    @classmethod
    def either(cls, first: Grammar, second: Grammar) -> Grammar:
        """What one of two allows, whose parts have names of their own."""
        start = f"start: @{first.parts[0]['name']} | @{second.parts[0]['name']}"
        return cls(({"name": "either", "lark_grammar": start}, *first.parts, *second.parts), first.param)


def answer_grammar(body: FormatFields) -> Grammar | None:
    """What the whole answer to a request has to be, None if its fields leave it free. Raises ApiError 400."""
    asked = body.structured()
    return format_grammar(body.response_format, "response_format") if asked is None else _structured_grammar(*asked)


def format_grammar(form: ResponseFormat | ResponsesSchemaFormat | None, param: str) -> Grammar | None:
    """The grammar of a form that chat completions and responses can ask for; None for text. Raises ApiError 400.

    A schema is enforced whether or not it is `strict`.
    """
    if form is None or isinstance(form, TextFormat):
        return None
    if isinstance(form, JsonObjectFormat):
        return Grammar.json_object(param)
    if isinstance(form, JsonSchemaFormat):
        return Grammar.from_json_schema(form.json_schema.schema_, f"{param}.json_schema.schema")
    return Grammar.from_json_schema(form.schema_, f"{param}.schema")


def _structured_grammar(asked: StructuredOutputsParams, param: str) -> Grammar:
    """The grammar of vLLM's `structured_outputs`. Raises ApiError 400 for what is none, too long or nested too deep."""
    size = len(asked.grammar or "")
    if size > MAX_GRAMMAR:
        message = f"{param}: the grammar has {size:,} characters, and at most {MAX_GRAMMAR:,} are taken"
        raise ApiError(400, message, param=param, code="invalid_grammar")
    try:
        if asked.json is not None:
            return Grammar.from_json_schema(read_schema(asked.json), param)
        return Grammar((asked.entry(),), param)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_grammar") from None


def tool_call_grammar(
    functions: Sequence[tuple[str, Mapping[str, Any]]], format: ToolFormatName, parallel: bool, param: str = "tools"
) -> Grammar:
    """A reply that calls one of the functions (name, JSON schema of its arguments), or several times if `parallel`.

    Each call is an object in the models' own spacing, set as `TOOL_FORMATS` says. Raises ApiError 400 as
    `Grammar.from_json_schema` does.
    """
    form = TOOL_FORMATS[format]
    opening = "" if form.opening_optional else f"{form.opening}\n"
    closing = f"\n{form.closing}" if form.closing else ""
    between = f"{form.separator} " if form.separator else "\n"
    rules = [
        f"start: call ({json.dumps(between)} call)*" if parallel else "start: call",
        f"call: {json.dumps(opening)} function {json.dumps('}' + closing)}",
        "function: " + " | ".join(f"function_{number}" for number in range(len(functions))),
    ]
    arguments = []
    _check_schemas([schema for _, schema in functions], param)
    for number, (name, schema) in enumerate(functions):
        # In the pieces in which llguidance reads any JSON, or it would take the {" of other objects for that of a call.
        before = ("{", '"name"', ": ", json.dumps(name), ", ", f'"{form.arguments_key}"', ": ")
        rules.append(f"function_{number}: {' '.join(map(json.dumps, before))} @arguments_{number}")
        arguments.append(_json_part(f"arguments_{number}", {**schema, "type": "object"}, param))
    return Grammar(({"name": "calls", "lark_grammar": "\n".join(rules)}, *arguments), param)


class GrammarChecker:
    """Tells whether grammars compile, in processes that can be killed; what it found is remembered.

    deadline: seconds that one grammar may take.
    """

    def __init__(self, deadline: float = 2.0) -> None:
        self._workers = [AsyncWorker("strata.serve.grammar_worker", deadline, _MAX_ANSWER) for _ in range(AT_ONCE)]
        self._turns = FairQueue(self._workers)
        self._asking: dict[tuple[str, str], asyncio.Task[str | None]] = {}
        self._found: OrderedDict[str, str | None] = OrderedDict()

    async def check(self, grammar: Grammar, admission: AdmittedRequest) -> None:
        """Raises ApiError 400, code "invalid_grammar", if the engine could not follow the grammar."""
        wrong = _too_long(grammar.text, MAX_MADE_BYTES) or await self._look_up(grammar.text, admission)
        if wrong is not None:
            raise ApiError(400, f"{grammar.param}: {wrong}", param=grammar.param, code="invalid_grammar")

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    async def _look_up(self, text: str, admission: AdmittedRequest) -> str | None:
        """What is wrong with a grammar. Requests of one caller that ask for the same at once share the answer."""
        if text in self._found:
            self._found.move_to_end(text)
            return self._found[text]
        asked = admission.caller.name, text
        if asked not in self._asking:
            self._asking[asked] = asyncio.create_task(self._ask(text, admission))
            self._asking[asked].add_done_callback(lambda _: self._asking.pop(asked))
        return await asyncio.shield(self._asking[asked])

    async def _ask(self, text: str, admission: AdmittedRequest) -> str | None:
        reply = await self._turns.run(admission, lambda worker: worker.ask({"grammar": text}))
        if "error" in reply:  # not remembered: a busy machine may have been the cause
            return f"it takes too much to compile ({reply['error']}): make it simpler"
        wrong = self._found[text] = cast(str | None, reply["wrong"])
        if len(self._found) > _MAX_REMEMBERED:
            self._found.popitem(last=False)
        return wrong


def _check_schemas(schemas: list[Any], param: str) -> None:
    """Raises ApiError 400 for what is no schema, nests too deep or is too long together, before work is spent on it."""
    for schema in schemas:
        if not isinstance(schema, Mapping):
            raise ApiError(400, f"{param} must be a JSON schema, which is an object, got {shown(schema)}", param=param)
        if _deeper_than(schema, MAX_DEPTH):
            message = f"{param}: it nests deeper than {MAX_DEPTH} objects and arrays"
            raise ApiError(400, message, param=param, code="invalid_grammar")
    if (wrong := _too_long(json.dumps(schemas))) is not None:
        raise ApiError(400, f"{param}: {wrong}", param=param, code="invalid_grammar")


def _json_part(name: str, schema: Mapping[str, Any], param: str) -> dict[str, Any]:
    try:
        return json_entry(name, schema)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_grammar") from None


def _too_long(text: str, most: int = MAX_BYTES) -> str | None:
    """What is wrong with a text in ASCII, if it is too long."""
    if len(text) <= most:
        return None
    return f"it comes to {len(text):,} bytes of grammar, and at most {most:,} are taken"


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return False
    return any(isinstance(one, Mapping | list) for one in level)


def _members(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
