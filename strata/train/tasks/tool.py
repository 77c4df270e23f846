"""A function that the model is offered, and a call of it: as clients write them, and as the model does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPENING, CLOSING = "<tool_call>\n", "\n</tool_call>"


@dataclass(frozen=True)
class Argument:
    """type: "string", "number" or "integer". choices: the only values, if any. optional: a call may leave it out."""

    name: str
    type: str = "string"
    choices: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class ExerciseTool:
    """A function and the arguments that it takes, in their order."""

    name: str
    description: str
    arguments: tuple[Argument, ...]

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as clients of OpenAI's API describe it."""
        properties: dict[str, dict[str, Any]] = {}
        for one in self.arguments:
            properties[one.name] = {"type": one.type} | ({"enum": list(one.choices)} if one.choices else {})
        required = [one.name for one in self.arguments if not one.optional]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    @property
    def line(self) -> str:
        """The tool as the chat template shows it: "add(a: number, b: number): Adds two numbers."."""
        arguments = ", ".join(
            f"{one.name}{'?' if one.optional else ''}: {'|'.join(one.choices) or one.type}" for one in self.arguments
        )
        return f"{self.name}({arguments})" + (f": {self.description}" if self.description else "")


def listing(tools: tuple[ExerciseTool, ...]) -> str:
    """The tools as the chat template shows them."""
    return "Tools:\n" + "\n".join(tool.line for tool in tools)


@dataclass(frozen=True)
class ExerciseCall:
    """What the model calls, and what comes back. arguments: name and value of each that is given."""

    name: str
    arguments: tuple[tuple[str, str | int | float], ...]
    result: str

    @property
    def text(self) -> str:
        """The call as the model writes it."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        return f'{OPENING}{{"name": "{self.name}", "arguments": {arguments}}}{CLOSING}'

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The call and its result as messages of a chat."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        return [called, {"role": "tool", "content": self.result}]
