"""The fields of a request that say what the whole answer has to be: OpenAI's `response_format`, and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.serve.http.errors import ApiError
from strata.serve.schema.base import RequestModel, Unsupported, described_as

MAX_CHOICES = 1024

_ONE_SPACING = "JSON has one spacing here, that of Python's json.dumps"


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class NamedSchema(RequestModel):
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """Has no effect: the schema is always followed."""


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
Schema = Annotated[dict[str, Any] | str, described_as("a JSON schema, as an object or as text")]
Choices = Annotated[list[Annotated[str, StringConstraints(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(RequestModel):
    """One of the first five."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    """A JSON schema, as an object or as text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole answer matches, in the syntax of Rust's `regex`."""
    choice: Choices | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar, in GBNF (`root ::= ...`) or in llguidance's dialect of Lark (`start: ...`)."""
    disable_any_whitespace: bool | None = None
    """Has no effect: JSON has one spacing. Nor has the next: there is one backend."""
    disable_fallback: bool | None = None
    disable_additional_properties: Annotated[
        Any, Unsupported("write additionalProperties: true into the schema", True)
    ] = None
    whitespace_pattern: Annotated[Any, Unsupported(_ONE_SPACING)] = None
    structural_tag: Annotated[Any, Unsupported("use tools, or a grammar")] = None


class FormatFields(RequestModel):
    response_format: ResponseFormat | None = None
    """What the answer must be: text, a JSON object, or JSON that follows a schema."""
    structured_outputs: StructuredOutputs | None = None
    """The same in more ways. (This and what follows are vLLM's extensions.)"""
    guided_json: Schema | None = None
    """The older name of structured_outputs.json."""
    guided_regex: str | None = None
    """The older name of structured_outputs.regex."""
    guided_choice: Choices | None = None
    """The older name of structured_outputs.choice."""
    guided_grammar: str | None = None
    """The older name of structured_outputs.grammar."""
    guided_decoding_backend: str | None = None
    """Has no effect: there is one."""
    guided_whitespace_pattern: Annotated[Any, Unsupported(_ONE_SPACING)] = None

    def structured(self) -> tuple[StructuredOutputsParams, str] | None:
        """What vLLM's fields ask for, and the field that does. Raises ApiError (400) unless they ask for one thing."""
        asked: dict[str, dict[str, Any]] = {}
        if self.structured_outputs is not None:
            given = self.structured_outputs
            values = {"json": given.json_, "json_object": given.json_object or None, "regex": given.regex}
            asked["structured_outputs"] = {**values, "choice": given.choice, "grammar": given.grammar}
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                asked[f"guided_{name}"] = {name: value}
        if not asked:
            return None
        (param, fields), *others = asked.items()
        if others or self.response_format is not None:
            other = others[0][0] if others else "response_format"
            raise ApiError(400, f"{param} and {other} both say what the answer has to be: give one", param=param)
        try:
            return StructuredOutputsParams(**fields), param
        except ValueError as error:
            raise ApiError(400, f"{param}: {error}", param=param) from None
