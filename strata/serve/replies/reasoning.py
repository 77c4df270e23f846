"""Splits what a model thought, between <think> and </think>, off what it answered, in a text that comes in pieces."""

from __future__ import annotations

from strata.serve.replies.reply_events import ContentDelta, ReasoningDelta

OPENING = "<think>"
CLOSING = "</think>"


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends inside the tags, as some chat templates make it, so that the reply begins there."""
    return prompt.rstrip().endswith(OPENING)


class ReasoningSplitter:
    """Splits a reply the same whatever pieces it comes in.

    Only what a reply begins with is reasoning; without a closing tag, all of it. Line breaks next to the tags are left
    out, as the chat templates put them back.
    opened: the reply begins inside the tags (see `opens_reasoning`); a model may repeat the opening tag all the same.
    """

    def __init__(self, opened: bool = False) -> None:
        self._opened = opened
        self._held = ""
        self._step = self._begin

    def append(self, text: str) -> list[ContentDelta | ReasoningDelta]:
        self._held += text
        return self._step(False)

    def finish(self) -> list[ContentDelta | ReasoningDelta]:
        """What was held back, when the reply is at its end."""
        return self._step(True)

    def _begin(self, ended: bool) -> list[ContentDelta | ReasoningDelta]:
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self._held = text[len(OPENING) :]
            self._step = self._begin_thinking
        elif OPENING.startswith(text) and not ended:
            return []
        else:
            self._step = self._begin_thinking if self._opened else self._answer
        return self._step(ended)

    def _begin_thinking(self, ended: bool) -> list[ContentDelta | ReasoningDelta]:
        self._held = self._held.lstrip("\n")
        if not self._held:
            return []
        self._step = self._think
        return self._step(ended)

    def _think(self, ended: bool) -> list[ContentDelta | ReasoningDelta]:
        thought, closed, rest = self._held.partition(CLOSING)
        if closed:
            thought = thought.rstrip("\n")
            self._held = rest
            self._step = self._begin_answer
        else:
            sure = len(self._held) if ended else _before_closing(self._held)
            thought, self._held = self._held[:sure], self._held[sure:]
        deltas: list[ContentDelta | ReasoningDelta] = [ReasoningDelta(thought)] if thought else []
        return deltas + self._step(ended) if closed else deltas

    def _begin_answer(self, ended: bool) -> list[ContentDelta | ReasoningDelta]:
        self._held = self._held.lstrip("\n")
        if not self._held:
            return []
        self._step = self._answer
        return self._step(ended)

    def _answer(self, ended: bool) -> list[ContentDelta | ReasoningDelta]:
        text, self._held = self._held, ""
        return [ContentDelta(text)] if text else []


def _before_closing(text: str) -> int:
    """Where line breaks and a beginning of the closing tag start at the end of `text`."""
    tag = max(length for length in range(len(CLOSING)) if text.endswith(CLOSING[:length]))
    return len(text[: len(text) - tag].rstrip("\n"))
