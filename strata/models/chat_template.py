"""Chat templates: messages to the text a model was trained on, rendered in a process that can be killed.

A template comes with the model and is foreign code. The sandbox keeps it from attributes and imports but not from
endless loops (nested ones pass every check), so it runs in `template_worker` under a deadline and a memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata.models.killable_worker import KillableWorker

MOST_CHARACTERS = 4_000_000

_MOST_ANSWER = 12 * MOST_CHARACTERS + 1000  # JSON escapes a character in at most 12 bytes (a surrogate pair)

_CONTINUED_HERE = "STRATA_CONTINUES_THIS_MESSAGE "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateRenderer:
    """Renders templates in one worker process, started when first needed and again after a kill. Thread-safe.

    deadline: seconds that one rendering may take.
    """

    def __init__(self, deadline: float = 2.0) -> None:
        self._worker = KillableWorker("strata.models.template_worker", deadline, _MOST_ANSWER)

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that `template` makes of `variables` (plain JSON values).

        Raises ValueError when the template refuses the variables, is wrong, or passes the limits of time, memory
        (1 GiB) or output (4 million characters).
        """
        request = {"template": template, "variables": dict(variables), "most_characters": MOST_CHARACTERS}
        try:
            reply = self._worker.ask(request)
        except (TypeError, ValueError) as error:
            raise ValueError(f"messages and tools must be plain JSON values: {error}") from None
        if "error" in reply:
            raise ValueError(f"the model's chat template failed: {reply['error']}")
        return str(reply["text"])

    def close(self) -> None:
        """End the worker. A later rendering starts another one."""
        self._worker.close()


def render_chat(
    renderer: TemplateRenderer,
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    special_tokens: Mapping[str, str],
) -> str:
    """Messages as the text that transformers' `apply_chat_template` makes of them.

    continue_final_message: leave the last message open, for the model to write on.
    special_tokens: "bos_token" and the like to their text, visible to the template.
    """
    chat = _checked(messages)
    if continue_final_message:
        if add_generation_prompt:
            raise ValueError("continue_final_message writes on in the last message: set add_generation_prompt=False")
        _mark_end(chat)
    text = renderer.render(
        template,
        {
            **special_tokens,
            "messages": chat,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut_at_mark(text) if continue_final_message else text


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages must be a list with at least one message, got {_short(messages)}")
    chat = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f'messages[{number}] must be like {{"role": "user", "content": "..."}}, got {_short(message)}'
            )
        # Clients send null for what is not there, and templates would print it.
        present = {key: value for key, value in message.items() if value is not None}
        reasoning = next((present[key] for key in _REASONING_FIELDS if key in present), None)
        if reasoning is not None:
            present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
        chat.append(present)
    return chat


def _mark_end(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUED_HERE
        return
    blocks = [dict(block) if isinstance(block, Mapping) else block for block in content or ()]
    for block in reversed(blocks):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            block["text"] += _CONTINUED_HERE
            chat[-1]["content"] = blocks
            return
    raise ValueError("continue_final_message needs a last message with text in its content")


def _cut_at_mark(text: str) -> str:
    mark = text.rfind(_CONTINUED_HERE.rstrip())
    if mark < 0:
        raise ValueError("continue_final_message: the model's chat template does not show the last message")
    if text.startswith(_CONTINUED_HERE, mark):
        return text[:mark]
    # The template strips messages; what it would have stripped from the end of this one is still before the mark.
    return text[:mark].rstrip()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
