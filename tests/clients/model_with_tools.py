"""A server whose model is a few rules: it counts turns, calls `add`, reads results and writes what a grammar asks for.

The requests, their prompts, grammars and replies are all real, so a client meets what it would meet with a trained
model that does as it is told.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

import strata
from strata.engine.process.messages import Add
from strata.serve.grammar_worker import TOKENIZER
from strata.serve.http.keys import KeyRing
from strata.serve.settings import ServeSettings
from strata.text.tokenizer import Tokenizer
from tests.serve.live import in_thread
from tests.serve.scripted import EOS, NAME, ScriptedEngine, ScriptedStream, delta, served

BUILTIN = Path(strata.__file__).parent / "models" / "builtin"
TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}<|end|>{% endif -%}
{%- for message in messages -%}
<|{{ 'user' if message.role == 'tool' else message.role }}|>
{%- if message.role == 'tool' %}Result: {% endif %}{{ message.content }}
{%- for call in message.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""
PERSON = '{"name": "Ann", "age": 30}'


def reply_to(prompt: str, grammar: str | None) -> str:
    """What the model writes. prompt: with its special tokens."""
    offered = re.findall(r"\[([\w-]+)\]", prompt.partition("<|end|>")[0]) if prompt.startswith("<|system|>[") else []
    turns = re.findall(r"<\|user\|>(.*?)<\|end\|>", prompt, re.DOTALL)
    last = turns[-1]
    if last.startswith("Result: "):
        text = f"The sum is {last.removeprefix('Result: ')}."
    elif "add" in offered and "Add 2 and 3" in last:
        text = _call("add", '{"a": 2, "b": 3}')
    else:
        text = f"This is turn {sum(not turn.startswith('Result: ') for turn in turns)}."
    if grammar is None:
        return text
    forms = [text, PERSON, *(_call(name, PERSON) for name in offered)]
    return next(form for form in forms if _takes(grammar, form))


def _call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


class RuleEngine(ScriptedEngine):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, ())
        self._tokenizer = tokenizer

    def submit(self, add: Add) -> ScriptedStream:
        prompt = self._tokenizer.decode(add.prompt, skip_special_tokens=False)
        ids = self._tokenizer.encode(reply_to(prompt, add.grammar), add_special_tokens=False)
        steps = [[delta(0, ids[at : at + 3])] for at in range(0, len(ids), 3)]
        return ScriptedStream(add.id, [*steps, [delta(0, [EOS], "stop")]], [], hangs=False)


@contextmanager
def rule_server(**settings: Any) -> Iterator[str]:
    """Where it listens. settings: of ServeSettings."""
    asked = ServeSettings("unused", (NAME,), tool_format="hermes", **settings)
    with Tokenizer.load(BUILTIN, chat_template=TEMPLATE) as tokenizer:
        gate, _ = served(RuleEngine(tokenizer), tokenizer, asked, KeyRing(()))
        with in_thread(gate) as url:
            yield url


if __name__ == "__main__":
    with rule_server() as address:
        print(address, flush=True)
        threading.Event().wait()
