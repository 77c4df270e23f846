"""openai-agents: a conversation, a tool, an output type, over chat completions and responses. Takes a URL."""

import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
settings = ModelSettings(reasoning=Reasoning(effort="low"), verbosity="low")
for model in (OpenAIChatCompletionsModel("scripted", client), OpenAIResponsesModel("scripted", client)):
    agent = Agent(name="a", instructions="Be brief.", model=model, model_settings=settings)
    first = Runner.run_sync(agent, "Hello")
    assert first.final_output == "This is turn 1.", first
    second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "And again"}])
    assert second.final_output == "This is turn 2.", second

    calling = Runner.run_sync(Agent(name="b", model=model, tools=[add]), "Add 2 and 3")
    assert calling.final_output == "The sum is 5.", calling
    after = Runner.run_sync(agent, [*calling.to_input_list(), {"role": "user", "content": "And again"}])
    assert after.final_output == "This is turn 2.", after

    for tools in ([], [add]):
        found = Runner.run_sync(Agent(name="c", model=model, tools=tools, output_type=Person), "Who?")
        assert found.final_output == Person(name="Ann", age=30)
