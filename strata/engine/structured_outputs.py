"""What an output has to be, as a grammar of llguidance: from a JSON schema, a regular expression, choices, or Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from llguidance import LLMatcher

# Between the tokens of JSON: a space, or a line break with its indentation. Bounded, or a model could write blanks
# until its tokens run out.
WHITESPACE = r" |\n[ ]{0,24}"


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that a schema describes. Whether the schema is sound and supported shows at compilation."""
    if "x-guidance" in schema:
        raise ValueError("'x-guidance' is not a keyword of JSON Schema: leave it out")
    return LLMatcher.grammar_from_json_schema(dict(schema), overrides={"whitespace_pattern": WHITESPACE})


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of one of several texts."""
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices))


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output has to be; one of these, with the names of vLLM.

    json: a JSON schema, as an object or as text. regex: a regular expression that the whole output matches (syntax of
    Rust's `regex`). choice: one of these texts. grammar: a Lark grammar in llguidance's dialect.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise ValueError(f"structured outputs need exactly one of {names}, got {', '.join(given) or 'none'}")
        if self.choice is not None and (isinstance(self.choice, str) or not all(self.choice)):
            raise ValueError(f"choice must be a list of texts that are not empty, got {self.choice!r}")

    def to_grammar(self) -> str:
        """The text of the grammar. Raises ValueError if `json` is no JSON object."""
        if self.json is not None:
            return json_grammar(_schema(self.json))
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return choice_grammar(self.choice)
        assert self.grammar is not None
        return LLMatcher.grammar_from_lark(self.grammar)


def _schema(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(given, str):
        return given
    try:
        schema = json.loads(given)
    except ValueError as error:
        raise ValueError(f"the JSON schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema must be an object, got {given!r}")
    return schema
