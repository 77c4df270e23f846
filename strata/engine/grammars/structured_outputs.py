"""What an output has to be, as a grammar of llguidance: from a JSON schema, a regular expression, choices, or Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from strata.engine.grammars.gbnf import gbnf_to_lark, is_gbnf
from strata.engine.grammars.schema_parts import with_closed_objects, with_formats_as_patterns, with_inner_bounds

# JSON is written as Python's json.dumps writes it: where blanks are free, a model can spend its tokens on them.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_TOO_DEEP = "the JSON schema nests too deep"


def json_entry(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """One of a grammar's parts, which others call `@name`: JSON that a schema describes, in one spacing.

    Whether the schema is sound and supported shows at compilation. Raises ValueError for a keyword of llguidance's own,
    and for a schema that nests too deep or whose parts would multiply (see `with_closed_objects`).
    """
    if "x-guidance" in schema:
        raise ValueError("'x-guidance' is not a keyword of JSON Schema: leave it out")
    try:
        repaired = with_formats_as_patterns(with_closed_objects(with_inner_bounds(schema)))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return {"name": name, "json_schema": {**repaired, "x-guidance": SPACING}}


def join_entries(*parts: Mapping[str, Any]) -> str:
    """The text of a grammar, which begins with the first part."""
    return json.dumps({"grammars": parts}, separators=(",", ":"))


# What each parameter may be, and how a message says it.
_ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "json": (lambda given: isinstance(given, str | Mapping), "a JSON schema, as an object or as text"),
    "json_object": (lambda given: given is True, "True or left out"),
    "regex": (lambda given: isinstance(given, str), "a text"),
    "choice": (
        lambda given: isinstance(given, list | tuple) and bool(given) and all(isinstance(t, str) and t for t in given),
        "a list of texts that are not empty",
    ),
    "grammar": (lambda given: isinstance(given, str), "a text"),
}


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output has to be; one of these, with the names of vLLM.

    json: a JSON schema, as an object or as text. json_object: any JSON object. regex: a regular expression that the
    whole output matches (syntax of Rust's `regex`). choice: one of these texts. grammar: a grammar in GBNF ("root ::=
    ..."), or in Lark as llguidance takes it.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise ValueError(f"structured outputs need exactly one of {names}, got {', '.join(given) or 'none'}")
        ((name, value),) = ((name, getattr(self, name)) for name in given)
        fits, meant = _ACCEPTED[name]
        if not fits(value):
            raise ValueError(f"{name} must be {meant}, got {value!r:.80}")

    def to_grammar(self) -> str:
        """The text of the grammar. Raises ValueError if `json` is no JSON object, or `grammar` no GBNF."""
        return join_entries(self.entry())

    def entry(self) -> dict[str, Any]:
        """The grammar's one part. Raises ValueError as `to_grammar` does."""
        if self.json is not None:
            return json_entry("json", read_schema(self.json))
        if self.json_object:
            return json_entry("json", {"type": "object"})
        if self.regex is not None:
            from llguidance import LLMatcher  # here, because what schedules requests does without it

            rule: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(self.regex))["grammars"][0]
            return {"name": "regex", "lark_grammar": rule["lark_grammar"]}
        if self.choice is not None:
            return {"name": "choice", "lark_grammar": "start: " + " | ".join(map(json.dumps, self.choice))}
        assert self.grammar is not None
        return {
            "name": "grammar",
            "lark_grammar": gbnf_to_lark(self.grammar) if is_gbnf(self.grammar) else self.grammar,
        }


def read_schema(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A JSON schema that is given as an object or as text. Raises ValueError if it is no JSON object."""
    if not isinstance(given, str):
        return given
    try:
        schema = json.loads(given)
    except ValueError as error:
        raise ValueError(f"the JSON schema is no JSON: {error}") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, got {given!r:.80}")
    return schema
