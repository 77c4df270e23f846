"""Chat templates: messages to the text a model was trained on, rendered in a process that can be killed.

A template comes with the model and is foreign code. The sandbox keeps it from attributes and imports but not from
endless loops (nested ones pass every check), so it runs in `template_worker` under a deadline and a memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

from strata.text.async_worker import AsyncWorker
from strata.text.killable_worker import KillableWorker
from strata.text.messages import REASONING_FIELDS, messages_for_template, short, tools_for_template
from strata.text.spelled_tokens import ChatText, SpelledTokens, TokenMarks

MAX_CHARACTERS = 4_000_000
DEADLINE = 2.0  # seconds for one rendering

_MODULE = "strata.text.template_worker"
_MAX_ANSWER = 12 * MAX_CHARACTERS + 1000  # JSON escapes a character in at most 12 bytes (a surrogate pair)

_CONTINUED_HERE = "STRATA_CONTINUES_THIS_MESSAGE "

NO_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
"""What is said of a rendering by other means than variables of the template."""


class ChatOptions(TypedDict, total=False):
    """What a chat template is told besides messages.

    add_generation_prompt: end with what opens the assistant's answer, the default. continue_final_message: leave the
        last message open instead, for the model to write on. tools: JSON schemas of the functions that it may call.
    variables: what else the template sees; none may be called as one of `NO_VARIABLES`.
    parse_special_tokens: special tokens that messages spell are that; otherwise they are text.
    chat_template: the text of one that is used instead of the model's.
    """

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any] | None
    parse_special_tokens: bool
    chat_template: str | None


@dataclass(frozen=True)
class Rendering:
    """What a template is to make of messages. request: for the worker. continued: the last message stays open.

    marks: stand in the request where messages spell special tokens.
    """

    request: dict[str, Any]
    continued: bool
    marks: TokenMarks

    @classmethod
    def of_chat(
        cls,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        special_tokens: Mapping[str, str],
        spelled: SpelledTokens | None = None,
        **options: Unpack[ChatOptions],
    ) -> Rendering:
        """As transformers' `apply_chat_template` renders messages and tools when they are in the one form of
        `strata.text.messages`, to which they are brought here. Raises ValueError for what is no chat.

        special_tokens: "bos_token" and the like to their text, visible to the template.
        spelled: finds what is no special token in messages, tools and variables, though it looks like one.
        """
        chat = [_with_reasoning(message) for message in messages_for_template(messages)]
        opens_answer, variables = options.get("add_generation_prompt", True), options.get("variables")
        continued = options.get("continue_final_message", False)
        if continued:
            if opens_answer:
                raise ValueError(
                    "continue_final_message writes on in the last message: set add_generation_prompt=False"
                )
            _mark_end(chat[-1])
        if variables is not None and not isinstance(variables, Mapping):
            raise ValueError(f"variables of the chat template must be an object, got {short(variables)}")
        if taken := next((name for name in variables or () if name in NO_VARIABLES), None):
            raise ValueError(f"{taken!r} is no variable of the chat template: give it as an argument of its own")
        shown = tools_for_template(options.get("tools"))
        fixed = {"messages": chat, "tools": shown, "add_generation_prompt": opens_answer}
        marks = (spelled or SpelledTokens(())).marks()
        seen = {**special_tokens, "documents": None, **marks.put({**(variables or {}), **fixed})}
        request = {"template": template, "variables": seen, "max_characters": MAX_CHARACTERS}
        return cls(request, continued, marks)

    def text(self, reply: Mapping[str, Any]) -> ChatText:
        """The text in the worker's reply. Raises ValueError if that tells a fault."""
        if "error" in reply:
            raise ValueError(f"the model's chat template failed: {reply['error']}")
        text = str(reply["text"])
        return self.marks.take(_cut_at_mark(text) if self.continued else text)


class TemplateRenderer:
    """Renders templates in one worker process, started when first needed and again after a kill. Thread-safe.

    deadline: seconds that one rendering may take.
    """

    def __init__(self, deadline: float = DEADLINE) -> None:
        self._worker = KillableWorker(_MODULE, deadline, _MAX_ANSWER)

    def render(self, rendering: Rendering) -> ChatText:
        """The text of a chat.

        Raises ValueError when the template refuses the variables, is wrong, or passes the limits of time, memory
        (1 GiB) or output (4 million characters), and for variables that are no plain JSON values.
        """
        try:
            reply = self._worker.ask(rendering.request)
        except (TypeError, ValueError) as error:
            raise _not_json(error) from None
        return rendering.text(reply)

    def close(self) -> None:
        """End the worker. A later rendering starts another one."""
        self._worker.close()


class AsyncTemplateRenderer:
    """TemplateRenderer for an event loop, which never waits for the worker; renderings are done in their order."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        self._worker = AsyncWorker(_MODULE, deadline, _MAX_ANSWER)

    async def render(self, rendering: Rendering) -> ChatText:
        """As TemplateRenderer's."""
        try:
            reply = await self._worker.ask(rendering.request)
        except (TypeError, ValueError) as error:
            raise _not_json(error) from None
        return rendering.text(reply)

    def close(self) -> None:
        """End the worker; renderings that wait fail. A later one starts another worker."""
        self._worker.close()


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if it has any, by each name that templates have for it."""
    if "reasoning_content" not in message:
        return message
    return message | dict.fromkeys(REASONING_FIELDS, message["reasoning_content"])


def _mark_end(last: dict[str, Any]) -> None:
    if "content" not in last:
        raise ValueError("continue_final_message needs a last message with a content")
    last["content"] += _CONTINUED_HERE


def _cut_at_mark(text: str) -> str:
    mark = text.rfind(_CONTINUED_HERE.rstrip())
    if mark < 0:
        raise ValueError("continue_final_message: the model's chat template does not show the last message")
    if text.startswith(_CONTINUED_HERE, mark):
        return text[:mark]
    # The template strips messages; what it would have stripped from the end of this one is still before the mark.
    return text[:mark].rstrip()


def _not_json(error: Exception) -> ValueError:
    return ValueError(f"messages and tools must be plain JSON values: {error}")
