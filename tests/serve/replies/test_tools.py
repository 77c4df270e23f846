"""Tool calls found in a reply: what is a call, what stays text, and that the pieces it comes in make no difference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.cli.serve_options import ToolCallFormat, tool_format
from strata.models.folder import BUILTIN_FOLDER
from strata.serve.http.errors import ApiError
from strata.serve.replies.json_reader import MAX_DEPTH, is_json_object
from strata.serve.replies.reply_events import ContentDelta, ReplyEvent, ToolCallArguments, ToolCallStart
from strata.serve.replies.reply_parser import Reply, ReplyParser, collect
from strata.serve.replies.tool_formats import format_in_template
from strata.serve.replies.tools import MAX_SCHEMA_BYTES, ToolChoice, ToolUse, use_tools
from strata.serve.schema.chat import Function
from strata.serve.schema.responses import ResponsesNamedTool
from strata.text.messages import tools_for_template
from strata.text.tokenizer import Tokenizer
from tests.serve.conftest import BUILTIN
from tests.serve.scripted import EOS, Serve, delta, scripted_server

FORMATS = ("hermes", "llama3")
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1, "b": [2, "}"]}}'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,20}", fullmatch=True)
calls = st.lists(st.tuples(names, st.dictionaries(st.text(), json_values, max_size=3)), min_size=1, max_size=3)
# Pieces that make texts which almost are calls.
fragments = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "<|python_tag|>",
                "<tool",
                "</",
                "<",
                "<|",
                ";",
                " ",
                "\n",
                "{",
                "}",
                "[",
                "]",
            ),
            *(
                '{"name": "f", ',
                '"arguments": ',
                '"parameters": ',
                '{"a": 1}',
                '"',
                ":",
                ",",
                "\\",
                "\\u12",
                "tru",
                "-1.5e",
            ),
            *(HERMES_CALL, LLAMA_CALL, "word", "ü🙂", '"name": "g"', "<think>", "</think>", "</thi"),
        ]
    ),
    max_size=12,
).map("".join)


def parse(text: str, tool_format: str | None, sizes: list[int] | None = None, **options: bool) -> list[ReplyEvent]:
    """The events of `text`, cut into pieces of these sizes and a rest."""
    parser = ReplyParser(tool_format, options.pop("reasoning", False), **options)
    events: list[ReplyEvent] = []
    for size in sizes or []:
        events += parser.append(text[:size])
        text = text[size:]
    return events + parser.append(text) + parser.finish()


def reply(text: str, tool_format: str | None, sizes: list[int] | None = None, **options: bool) -> Reply:
    return without_ids(collect(parse(text, tool_format, sizes, **options)))


def without_ids(whole: Reply) -> Reply:
    for call in whole.tool_calls:
        assert call.id.startswith("call_")
        call.id = ""
    return whole


def told(whole: Reply) -> tuple[str, list[tuple[str, str]]]:
    return whole.content, [(call.name, call.arguments) for call in whole.tool_calls]


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "found"),
    [
        ("hermes", HERMES_CALL, "", [("add", ARGUMENTS)]),
        ("hermes", f"Let me see.\n{HERMES_CALL}\n{HERMES_CALL}", "Let me see.", [("add", ARGUMENTS)] * 2),
        ("hermes", f"a {HERMES_CALL} b", "ab", [("add", ARGUMENTS)]),
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", [("f", '{"a":1}')]),
        ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"id":7,"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}', "", [("f", "{}")]),
        ("hermes", LLAMA_CALL, LLAMA_CALL, []),
        ("llama3", LLAMA_CALL, "", [("add", ARGUMENTS)]),
        ("llama3", f" {LLAMA_CALL}; {LLAMA_CALL}", "", [("add", ARGUMENTS)] * 2),
        ("llama3", f"<|python_tag|>{LLAMA_CALL}", "", [("add", ARGUMENTS)]),
        ("llama3", f"I call.<|python_tag|>{LLAMA_CALL}", "I call.", [("add", ARGUMENTS)]),
        ("llama3", f"I call {LLAMA_CALL}", f"I call {LLAMA_CALL}", []),
        ("llama3", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3", HERMES_CALL, HERMES_CALL, []),
    ],
)
def test_calls_are_told_from_text(tool_format: str, text: str, content: str, found: list[tuple[str, str]]) -> None:
    assert told(reply(text, tool_format)) == (content, found)


@pytest.mark.parametrize(
    "inside",
    [
        "not json",
        "",
        "{",
        '{"name": "f"}',
        '{"name": "", "arguments": {}}',
        '{"name": "no spaces", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"name": ["f"], "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f", "arguments": "{\\"a\\": NaN}"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name" "f", "arguments": {}}',
        '{"name": "f",, "arguments": {}}',
        '{"arguments": {"a": 01}, "name": "f"}',
        "__import__('os').system('true')",
        '{"arguments": ' + "[" * 5000,
        '{"name": "f", "arguments": "' + '{\\"a\\":' * 5000 + '"}',
    ],
)
def test_a_malformed_call_is_content(inside: str) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    assert told(reply(text, "hermes")) == (text, [])


def test_what_only_begins_like_a_tag_is_held_back_and_then_released() -> None:
    parser = ReplyParser("hermes", reasoning=False)
    assert parser.append("1 <") == [ContentDelta("1")]
    assert parser.append("tool_") == []
    assert parser.append("box>") == [ContentDelta(" <tool_box>")]
    assert parser.append(" <tool_call") == []
    assert parser.finish() == [ContentDelta(" <tool_call")]


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ReplyParser("hermes", reasoning=False)
    assert parser.append('<tool_call>{"name": "write_file", "arguments": ') == []
    first, brace = parser.append("{")
    assert isinstance(first, ToolCallStart)
    assert (first.index, first.name) == (0, "write_file")
    assert brace == ToolCallArguments(0, "{")
    assert parser.append('"text": "a long') == [ToolCallArguments(0, '"text": "a long')]
    assert parser.append(' text"}') == [ToolCallArguments(0, ' text"}')]
    assert parser.append("}</tool_call>") == []
    assert parser.finish() == []


def test_a_call_that_breaks_after_its_arguments_began_keeps_what_was_passed_on() -> None:
    text = 'Hm.<tool_call>{"name": "f", "arguments": {"a": 1, "b": oh}}</tool_call>'
    assert told(reply(text, "hermes")) == ("Hm.oh}}</tool_call>", [("f", '{"a": 1, "b": ')])


def test_every_call_has_an_id_of_its_own() -> None:
    ids = [call.id for call in collect(parse(HERMES_CALL * 3, "hermes")).tool_calls]
    assert len(set(ids)) == 3


def test_without_parallel_calls_only_the_first_is_made() -> None:
    whole = collect(parse(f"{HERMES_CALL}{HERMES_CALL}", "hermes", parallel=False))
    assert [call.arguments for call in whole.tool_calls] == [ARGUMENTS]
    assert whole.content == ""


def test_calls_in_what_the_model_thought_are_not_made() -> None:
    whole = reply(f"<think>{HERMES_CALL}</think>No.", "hermes", reasoning=True)
    assert whole == Reply("No.", HERMES_CALL, [])


def test_without_a_tool_format_everything_is_content() -> None:
    assert reply(HERMES_CALL, None) == Reply(HERMES_CALL, "", [])


@given(calls, st.sampled_from(FORMATS), st.lists(st.integers(1, 9), max_size=40), st.booleans())
@settings(max_examples=150, deadline=None)
def test_well_formed_calls_come_out_as_they_were_written(
    wanted: list[tuple[str, dict[str, object]]], tool_format: str, sizes: list[int], ascii_only: bool
) -> None:
    written = [(name, json.dumps(arguments, ensure_ascii=ascii_only)) for name, arguments in wanted]
    # Text that has no UTF-8 cannot come from a tokenizer.
    written = [(name, arguments.encode(errors="replace").decode()) for name, arguments in written]
    if tool_format == "hermes":
        text = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in written
        )
    else:
        text = "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in written)
    assert told(reply(text, tool_format, sizes)) == ("", written)


@given(
    fragments, st.sampled_from((*FORMATS, None)), st.lists(st.integers(1, 9), max_size=40), st.booleans(), st.booleans()
)
@settings(max_examples=300, deadline=None)
def test_the_pieces_make_no_difference(
    text: str, tool_format: str | None, sizes: list[int], reasoning: bool, opened: bool
) -> None:
    options = {"reasoning": reasoning, "in_reasoning": opened}
    assert reply(text, tool_format, sizes, **options) == reply(text, tool_format, **options)


@given(fragments, st.sampled_from(FORMATS))
@settings(max_examples=300, deadline=None)
def test_no_text_is_lost_outside_calls(text: str, tool_format: str) -> None:
    whole = reply(text, tool_format)
    if whole.tool_calls:
        kept = iter(text)
        assert all(character in kept for character in whole.content), "content is not a subsequence of the reply"
    else:
        assert whole.content == text


@given(json_values | st.dictionaries(st.text(), json_values), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_reader_takes_what_json_writes(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode(errors="replace").decode()
    assert is_json_object(f" {text}\n") == isinstance(value, dict)


@given(
    st.lists(st.sampled_from([*list('{}[]",:\\ 01.e-+tn\n'), "true", "null", '"a"', "\\n"]), max_size=14).map("".join)
)
@settings(max_examples=500, deadline=None)
def test_the_reader_refuses_what_json_refuses(inside: str) -> None:
    text = '{"a": ' + inside + "}"
    try:
        json.loads(text)
        valid = True
    except ValueError:
        valid = False
    assert is_json_object(text) == valid


def test_the_reader_bounds_the_depth() -> None:
    def nested(depth: int) -> str:
        return '{"a": ' * depth + "1" + "}" * depth

    assert is_json_object(nested(MAX_DEPTH))
    assert not is_json_object(nested(MAX_DEPTH + 1))


ADD = Function.model_validate(
    {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    }
)
NOW = Function(name="now")


def test_tools_are_shown_and_calls_looked_for_unless_the_choice_is_none() -> None:
    used = use_tools([ADD, NOW], None, parallel=True, tool_format="hermes")
    assert used.tool_format == "hermes"
    assert used.grammar is None
    assert tools_for_template(used.shown) == [
        {"type": "function", "function": {"name": "add", "description": "adds", "parameters": ADD.parameters}},
        {
            "type": "function",
            "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    assert use_tools([ADD], "none", parallel=True, tool_format="hermes") == ToolUse()
    assert use_tools([], None, parallel=True, tool_format=None) == ToolUse()


@pytest.mark.parametrize(
    ("functions", "choice", "tool_format", "said"),
    [
        ([ADD], "auto", None, "--tool-call-parser"),
        ([], "required", "hermes", "tools is empty"),
        ([ADD], ResponsesNamedTool(type="function", name="now"), "hermes", "'now'.*: add"),
        ([ADD, ADD], "auto", "hermes", r"tools\[1\]: there is a function 'add' already"),
        ([Function(name="f", parameters={"type": "string"})], "auto", "hermes", 'a JSON schema of type "object"'),
        ([Function(name="f", parameters={"properties": []})], "auto", "hermes", "properties must be an object"),
        ([Function(name="f", parameters={"required": "a"})], "auto", "hermes", "required must be a list"),
        ([Function(name="f", parameters={"description": "x" * MAX_SCHEMA_BYTES})], "auto", "hermes", "at most 65536"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(
    functions: list[Function], choice: ToolChoice, tool_format: str | None, said: str
) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        use_tools(functions, choice, parallel=True, tool_format=tool_format)
    assert caught.value.status == 400
    assert caught.value.param is not None


def test_a_chat_that_wants_one_call_gets_one(serve_script: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HERMES_CALL * 2, add_special_tokens=False)
    tool = {"type": "function", "function": {"name": "add"}}
    with serve_script([[delta(0, [*ids, EOS], "stop")]], settings={"tool_format": "hermes"}) as served:
        for parallel, calls in ((True, 2), (False, 1)):
            message = served.chat(tools=[tool], parallel_tool_calls=parallel)["choices"][0]["message"]
            assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS] * calls
            assert message["content"] is None


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Tokenizer]:
    """The built-in tokenizer with special tokens for the tags."""
    shutil.copytree(BUILTIN, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["additional_special_tokens"] = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with Tokenizer.load(tmp_path) as tokenizer:
        yield tokenizer


def test_tags_that_are_special_tokens_are_seen(marked: Tokenizer) -> None:
    ids = marked.encode(f"<think>hm</think>So.{HERMES_CALL}", add_special_tokens=False)
    assert marked.special_ids & set(ids)
    tool: dict[str, Any] = {"type": "function", "name": "add"}
    settings = {"tool_format": "hermes", "reasoning": True}
    with scripted_server(marked, [[delta(0, [*ids, EOS], "stop")]], settings=settings) as served:
        message = served.chat(tools=[{"type": "function", "function": {"name": "add"}}])["choices"][0]["message"]
        answer = served.client.post("/v1/responses", json={"input": "Hi", "tools": [tool]}).json()
    assert (message["content"], message["reasoning_content"]) == ("So.", "hm")
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]


# As the templates of these models have it; in files the line breaks and quotes inside their strings are escaped.
QWEN = r"""{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}"""
HERMES = r"""{{- "as follows:\n<tool_call>\n{\"arguments\": <args-dict>, \"name\": <function-name>}\n</tool_call>" }}"""
LLAMA = """{{- 'in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
OTHERS = (
    r"""{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}""",  # a form that no parser here reads
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "",
)


@pytest.mark.parametrize(
    ("template", "found"), [(QWEN, "hermes"), (HERMES, "hermes"), (LLAMA, "llama3"), *((one, None) for one in OTHERS)]
)
def test_a_template_tells_how_its_model_calls(template: str, found: str | None, tmp_path: Path) -> None:
    assert format_in_template(template) == found
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert tool_format(None, str(tmp_path)) == found
    assert tool_format(None, str(tmp_path), chat_template=HERMES) == "hermes"
    assert tool_format(ToolCallFormat.LLAMA3_JSON, str(tmp_path)) == "llama3"
    (tmp_path / "chat_template.jinja").write_text(QWEN)
    assert tool_format(None, str(tmp_path)) == "hermes"


def test_the_template_for_tools_tells_if_there_is_one(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": ""}, {"name": "tool_use", "template": HERMES}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert tool_format(None, str(tmp_path)) == "hermes"


def test_the_template_of_the_exercises_tells_as_well() -> None:
    assert format_in_template((BUILTIN_FOLDER / "chat_template.jinja").read_text()) == "hermes"
