"""litellm: turns that go back as they came, a tool round trip, streams put together, a pydantic model. Takes a URL."""

import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel

SERVER: dict[str, Any] = {"model": "openai/scripted", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


class Person(BaseModel):
    name: str
    age: int


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(messages: list[Any], stream: bool, **options: Any) -> Any:
    reply = litellm.completion(messages=messages, stream=stream, **options, **SERVER)
    return (litellm.stream_chunk_builder(list(reply)) if stream else reply).choices[0].message


for stream in (False, True):
    for sent_back in (lambda message: message, lambda message: message.model_dump()):
        messages: list[Any] = [user("Hello")]
        messages.append(sent_back(answer(messages, stream)))
        assert messages[-1]["content"] == "This is turn 1.", messages
        messages.append(user("And again"))
        assert (
            answer(messages, stream, reasoning_effort="low", allowed_openai_params=["reasoning_effort"]).content
            == "This is turn 2."
        )

        messages = [user("Add 2 and 3")]
        messages.append(sent_back(answer(messages, stream, tools=[ADD])))
        (call,) = messages[-1]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "5"})
        assert answer(messages, stream, tools=[ADD]).content == "The sum is 5."

    person = answer([user("Who?")], stream, response_format=Person)
    assert Person.model_validate_json(person.content) == Person(name="Ann", age=30)
