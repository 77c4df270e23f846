"""The body of a chat completion request: every field of OpenAI's API, taken or refused, and vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from strata.serve.http.errors import ApiError
from strata.serve.replies.tool_formats import FUNCTION_NAME
from strata.serve.schema.base import RequestModel, Unsupported, described_as
from strata.serve.schema.messages import Message, TemplateFields
from strata.serve.schema.sampling import Count, GenerationFields, SamplingFields, TopLogprobs
from strata.serve.schema.structured import FormatFields
from strata.text.messages import NO_ARGUMENTS

# Every request carries its tools through the template, and templates have a time limit.
MAX_TOOLS = 128
_OLD_TOOLS = "use tools and tool_choice"
_TEXT_ONLY = "this server writes text only"

FunctionName = Annotated[
    str,
    StringConstraints(pattern=f"^{FUNCTION_NAME.pattern}$"),
    described_as("a string of 1 to 64 letters, digits, _ or -"),
]


class Function(RequestModel):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; absent for a function without any."""
    strict: bool | None = None
    """Has no effect: arguments follow their schema wherever a call is forced, and only there."""

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or NO_ARGUMENTS

    @property
    def tool(self) -> dict[str, Any]:
        """As chat templates are told of it."""
        return {"type": "function", "function": self.model_dump(include={"name", "description", "parameters"})}


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class NamedFunction(RequestModel):
    name: FunctionName


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    described_as('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'),
]


class DialogueFields(GenerationFields):
    """What requests of chat completions and of responses have in common."""

    top_logprobs: TopLogprobs | None = None
    """Tell the log-probabilities of so many of the likeliest tokens too; only where those of the tokens are told."""
    parallel_tool_calls: bool | None = None
    """May one answer hold several calls; the default."""

    safety_identifier: str | None = None
    """Has no effect: who sends a request is known by its key."""
    prompt_cache_key: str | None = None
    """Has no effect: prefixes are cached by themselves."""
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """Has no effect."""
    service_tier: Annotated[Any, Unsupported("there is one tier here", "auto", "default")] = None
    prompt_cache_options: Annotated[Any, Unsupported("prefixes are cached by themselves")] = None
    moderation: Annotated[Any, Unsupported("this server does not moderate")] = None


class ChatRequest(TemplateFields, FormatFields, DialogueFields, SamplingFields):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    """The most tokens to generate in each sample; absent, as many as the model has room for."""
    max_tokens: Count | None = None
    """The older name of max_completion_tokens."""
    logprobs: bool | None = None
    """Tell the log-probability of each token."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """May it call them (auto, the default), must it (required, or a named one), or not (none)."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable for the chat template, which decides what comes of it; most have no use for it."""

    metadata: dict[str, str] | None = None
    """Has no effect: answers are not stored."""
    store: bool | None = None
    """Has no effect: answers of this endpoint are not stored."""
    modalities: Annotated[Any, Unsupported(_TEXT_ONLY, ["text"])] = None
    audio: Annotated[Any, Unsupported(_TEXT_ONLY)] = None
    prediction: Annotated[Any, Unsupported("leave it out; the answer is the same without")] = None
    verbosity: Verbosity | None = None
    """Has no effect: models here take no such setting; say it in a message."""
    web_search_options: Annotated[Any, Unsupported("this server fetches nothing")] = None
    functions: Annotated[Any, Unsupported(_OLD_TOOLS)] = None
    function_call: Annotated[Any, Unsupported(_OLD_TOOLS)] = None

    @property
    def offered(self) -> list[Function]:
        """The functions of its tools."""
        return [tool.function for tool in self.tools or ()]

    @property
    def requested_max_tokens(self) -> int | None:
        """The most tokens to generate, by whichever name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def reported_logprobs(self) -> int | None:
        """How many of the likeliest tokens to report at each position; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raises ApiError (400) for fields that do not go together."""
        self.check_stream_options()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(400, "max_tokens is the older name of max_completion_tokens: give one", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        self.check_template()

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **super().template_variables}
