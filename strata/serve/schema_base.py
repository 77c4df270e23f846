"""What all request bodies have in common: unknown fields are refused, types are strict, null means absent."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError, ValidationError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler


class RequestModel(BaseModel):
    """A JSON object of a request: "5" is not 5, true is not 1, and NaN is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ReplyModel(BaseModel):
    """A JSON object of an answer. Fields that were not set are left out when it is written."""

    model_config = ConfigDict(extra="forbid")


def refused(reason: str) -> Any:
    """The type of a field of OpenAI's API that only null is taken for; the message is its name and `reason`."""

    def check(value: Any) -> None:
        if value is not None:
            raise PydanticCustomError("refused", "{reason}", {"reason": reason})

    return Annotated[
        None, BeforeValidator(check), WithJsonSchema({"type": "null"}), Field(description=f"Not supported: {reason}.")
    ]


def said_as(kinds: str) -> WrapValidator:
    """For a union: its fault is told as one, "must be {kinds}", rather than as one fault for each kind."""

    def check(value: Any, handle: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handle(value)
        except ValidationError:
            raise PydanticCustomError("kind", "Input should be {kinds}", {"kinds": kinds}) from None

    return WrapValidator(check)
