"""pydantic-ai: a conversation, tools, each kind of output, over chat completions and responses. Takes a URL."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none")
for model in (OpenAIChatModel("scripted", provider=provider), OpenAIResponsesModel("scripted", provider=provider)):
    agent = Agent(model, retries=0)
    first = agent.run_sync("Hello")
    assert first.output == "This is turn 1.", first
    second = agent.run_sync("And again", message_history=first.all_messages())
    assert second.output == "This is turn 2.", second

    calling = Agent(model, tools=[add], retries=0).run_sync("Add 2 and 3")
    assert calling.output == "The sum is 5.", calling
    after = agent.run_sync("And again", message_history=calling.all_messages())
    assert after.output == "This is turn 2.", after

    for output in (Person, ToolOutput(Person), NativeOutput(Person), PromptedOutput(Person)):
        found = Agent(model, output_type=output, retries=0).run_sync("Who?")
        assert found.output == Person(name="Ann", age=30), output
    both = Agent(model, tools=[add], output_type=NativeOutput(Person), retries=0).run_sync("Who?")
    assert both.output == Person(name="Ann", age=30)
