"""langchain: a conversation, a tool round trip, structured output, over chat completions and responses. Takes a URL."""

import sys

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """Someone."""

    name: str
    age: int


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


for responses in (False, True):
    model = ChatOpenAI(
        model="scripted", base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, use_responses_api=responses
    )
    history: list[BaseMessage] = [HumanMessage("Hello")]
    history.append(model.invoke(history))
    assert history[-1].text == "This is turn 1.", history
    history.append(HumanMessage("And again"))
    assert "".join(chunk.text for chunk in model.stream(history)) == "This is turn 2."

    with_tools = model.bind_tools([add])
    history = [HumanMessage("Add 2 and 3")]
    reply = with_tools.invoke(history)
    history.append(reply)
    history += [add.invoke(call) for call in reply.tool_calls]
    assert with_tools.invoke(history).text == "The sum is 5."

    for method in ("json_schema", "function_calling", "json_mode"):
        structured = model.with_structured_output(Person, method=method)
        assert structured.invoke("Who? Answer in JSON.") == Person(name="Ann", age=30), method
