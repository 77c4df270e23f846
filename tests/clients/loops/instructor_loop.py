"""instructor: a pydantic model in each of its modes, and in the middle of a conversation. Takes a URL."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0), mode=mode)
    messages = [{"role": "user", "content": "Who?"}]
    for _ in range(2):
        person, reply = client.chat.completions.create_with_completion(
            model="scripted", messages=messages, response_model=Person, max_retries=0
        )
        assert (person.name, person.age) == ("Ann", 30), mode
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "Who else?"}]
        messages = [message for message in messages if not message.get("tool_calls")]
