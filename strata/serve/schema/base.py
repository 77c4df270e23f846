"""What all request bodies have in common: unknown fields are refused, types are strict, null means absent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, WrapValidator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic.types import Discriminator
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler, no_info_plain_validator_function

MAX_FIELDS = 256  # of one object


def _fail_fast(schema: Any) -> None:
    """Have all lists and mappings in a schema stop at their first fault."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for one in schema:
            _fail_fast(one)


class RequestModel(BaseModel):
    """A JSON object of a request: "5" is not 5, true is not 1, and NaN is no number.

    Of a list or a mapping the first fault is reported, so that one full of faults costs no more than one with one.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _bounded_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            message = "Input should have at most {most} fields"
            raise PydanticCustomError("too_many_fields", message, {"most": MAX_FIELDS})
        return value


class HistoryModel(RequestModel):
    """A part of what was said before. Fields that are not known are ignored: clients send messages back with whatever
    they, or another server, have put into them.
    """

    model_config = ConfigDict(extra="ignore")


class ReplyModel(BaseModel):
    """A JSON object of an answer. Fields that were not set are left out when it is written."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Unsupported:
    """Marks a field of OpenAI's API that is not supported: only null and the values `accepted` pass.

    Use as `Annotated[Any, Unsupported(...)]`. reason: what the error says, after "... is not supported: ".
    """

    def __init__(self, reason: str, *accepted: Any) -> None:
        self._reason = reason
        self._accepted = accepted

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [*self._accepted, None], "description": f"Not supported: {self._reason}."}

    def _check(self, value: Any) -> Any:
        if value is None or any(type(value) is type(one) and value == one for one in self._accepted):
            return value
        raise PydanticCustomError("refused", "{reason}", {"reason": self._reason})


def discriminated_by(kind_of: Callable[[Any], str | None], fault: str, message: str) -> Discriminator:
    """For a union whose kinds have tags. kind_of: the tag of a value. fault, message: for a value that is of none."""
    return Discriminator(kind_of, custom_error_type=fault, custom_error_message=message)


def text_or(other: str, fault: str, message: str) -> Discriminator:
    """For a union of a string, whose tag is "text", and a list."""

    def kind_of(value: Any) -> str | None:
        return "text" if isinstance(value, str) else other if isinstance(value, list) else None

    return discriminated_by(kind_of, fault, message)


def described_as(kinds: str) -> WrapValidator:
    """For a union: its fault is reported as one, "must be {kinds}", rather than as one fault for each kind."""

    def check(value: Any, handle: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handle(value)
        except ValidationError:
            raise PydanticCustomError("kind", "Input should be {kinds}", {"kinds": kinds}) from None

    return WrapValidator(check)
