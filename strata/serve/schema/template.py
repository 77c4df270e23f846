"""The fields of a request that say how the model's chat template is to render its messages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from strata.serve.http.errors import ApiError
from strata.serve.schema.base import RequestModel
from strata.text.chat_template import NO_VARIABLES


class TemplateFields(RequestModel):
    add_generation_prompt: bool | None = None
    """Open the assistant's answer after the messages; the default. (This and what follows are vLLM's extensions.)"""
    continue_final_message: bool | None = None
    """Leave the last message open instead, to be written on."""
    chat_template_kwargs: (
        Annotated[dict[str, Any], Field(json_schema_extra={"propertyNames": {"not": {"enum": list(NO_VARIABLES)}}})]
        | None
    ) = None
    """Variables for the chat template, such as `enable_thinking`; one that the template does not read has no effect."""
    parse_special_tokens: bool | None = None
    """Special tokens that messages spell become those tokens; by default they are text. (An extension of our own.)"""

    def check_template(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                400,
                "continue_final_message leaves the last message open: leave out add_generation_prompt",
                param="add_generation_prompt",
            )
        for name in self.chat_template_kwargs or ():
            if name in NO_VARIABLES:
                where = f"chat_template_kwargs.{name}"
                raise ApiError(400, f"{where}: this is no variable that a request can set there", param=where)

    @property
    def opens_answer(self) -> bool:
        return not self.continue_final_message and self.add_generation_prompt is not False
