"""Chat templates: messages to the text a model was trained on, rendered in a process that can be killed.

A template comes with the model and is foreign code. The sandbox keeps it from attributes and imports but not from
endless loops (nested ones pass every check), so it runs in `template_worker` under a deadline and a memory limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

MOST_CHARACTERS = 4_000_000

_SCRIPT = Path(__file__).with_name("template_worker.py")
_START_SECONDS = 30.0
_MOST_ANSWER = 12 * MOST_CHARACTERS + 1000  # JSON escapes a character in at most 12 bytes (a surrogate pair)

# What Python needs to start, and the time zone. A template that escaped its sandbox would find no keys here.
_PASSED_ENVIRONMENT = ("PATH", "HOME", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")

_CONTINUED_HERE = "STRATA_CONTINUES_THIS_MESSAGE "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateRenderer:
    """Renders templates in one worker process, started when first needed and again after a kill. Thread-safe.

    deadline: seconds that one rendering may take.
    """

    def __init__(self, deadline: float = 2.0) -> None:
        self._deadline = deadline
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._end_worker: Callable[[], Any] = lambda: None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text that `template` makes of `variables` (plain JSON values).

        Raises ValueError when the template refuses the variables, is wrong, or passes the limits of time, memory
        (1 GiB) or output (4 million characters).
        """
        request = {
            "template": template,
            "variables": dict(variables),
            "seconds": self._deadline,
            "most_characters": MOST_CHARACTERS,
        }
        try:
            line = json.dumps(request)
        except (TypeError, ValueError) as error:
            raise ValueError(f"messages and tools must be plain JSON values: {error}") from None
        with self._lock:
            reply = self._ask(line)
        if "error" in reply:
            raise ValueError(f"the model's chat template failed: {reply['error']}")
        return str(reply["text"])

    def close(self) -> None:
        """End the worker. A later rendering starts another one."""
        with self._lock:
            self._stop()

    def _ask(self, line: str) -> dict[str, Any]:
        if self._worker is None or not self._worker.alive:
            self._stop()
            self._worker = _Worker()
            self._end_worker = weakref.finalize(self, self._worker.end)
            if self._worker.exchange("", _START_SECONDS) is None:
                self._stop()
                raise RuntimeError(f"the chat template process did not start: try {sys.executable} -P {_SCRIPT}")
        reply = self._worker.exchange(line, self._deadline)
        expired = self._worker.expired
        if reply is None or expired:
            self._stop()
        if reply is None:
            return {"error": f"it ran longer than {self._deadline:g} s" if expired else "its process died"}
        return reply

    def _stop(self) -> None:
        self._end_worker()
        self._worker = None


class _Worker:
    """One process that runs `template_worker.py`, and its pipes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # -P: this folder must not come first in the import path, its modules have common names.
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            env={name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C in the terminal is for the parent
        )
        self._requests = cast(TextIO, self._process.stdin)
        self._answers = cast(TextIO, self._process.stdout)
        self.expired = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, line: str, seconds: float) -> dict[str, Any] | None:
        """Send a line (none if empty) and read one answer. None if the worker died, or was killed when time ran out."""
        # A kill ends a blocked write as well as a blocked read, so neither needs a timeout of its own.
        timer = threading.Timer(seconds, self._expire)
        timer.start()
        answer = ""
        try:
            if line:
                self._requests.write(line + "\n")
                self._requests.flush()
            answer = self._answers.readline(_MOST_ANSWER)
        except OSError:  # the pipe broke
            pass
        finally:
            timer.cancel()
            timer.join()
        return json.loads(answer) if answer.endswith("\n") else None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with suppress(OSError):  # closing flushes what was never read
                pipe.close()

    def _expire(self) -> None:
        self.expired = True
        self._process.kill()


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
