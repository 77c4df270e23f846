"""Grammars of replies: outputs that follow them are right, and those that cannot be followed are refused in time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from fastapi.exceptions import RequestValidationError
from llguidance import LLMatcher
from pydantic import ValidationError

from strata.engine.grammars.grammar import GrammarCompiler, Masks
from strata.engine.grammars.matchers import takes_end
from strata.serve.grammar import Grammar, GrammarChecker, answer_grammar, tool_call_grammar
from strata.serve.grammar_worker import what_is_wrong
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest, Caller, Limits
from strata.serve.http.validation import explain_fault
from strata.serve.replies.reply_parser import ReplyParser, collect
from strata.serve.replies.tool_formats import TOOL_FORMATS, ToolFormatName
from strata.serve.schema.chat import ChatRequest
from strata.serve.settings import ServeSettings
from strata.text.tokenizer import Tokenizer
from tests.serve.random_schemas import random_schema

SCHEMA = "response_format.json_schema.schema"
PART = 125
# After so many ids an output is led to its end.
LONG = 60


class Writer:
    """Writes outputs as an engine does whose model has no idea: any id that the mask allows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        (self._end,) = tokenizer.eos_ids
        self._size = tokenizer.vocab_size
        self._bytes = tokenizer.token_bytes
        self._closing = [tokenizer.id(mark) for mark in '"}]']
        self._compiler = GrammarCompiler(tokenizer, [self._end], self._size)
        self._masks = Masks(self._size, 1, torch.device("cpu"))

    def allowed(self, matcher: LLMatcher) -> list[int]:
        under_way = self._masks.start([matcher])
        assert under_way is not None
        sent = under_way.send(torch.device("cpu"))
        assert not matcher.is_error()
        bits = np.unpackbits(sent[0][0].numpy().view(np.uint8), bitorder="little")[: self._size]
        return np.flatnonzero(bits).tolist()

    def write(self, grammar: Grammar, seed: int, liked: Callable[[bytes], bool] = lambda _: False) -> str:
        """An output, of ids that are `liked` wherever one is allowed."""
        chance = np.random.default_rng(seed)
        matcher = self._compiler.compile(grammar.text)
        ids: list[int] = []
        while True:
            allowed = self.allowed(matcher)
            preferred = [id for id in allowed if liked(self._bytes(id))]
            if len(ids) > LONG and chance.random() < 0.7:
                preferred = [self._end] if self._end in allowed else [id for id in self._closing if id in allowed]
            ids.append(int(chance.choice(preferred or allowed)))
            if takes_end(matcher, ids[-1]):
                return b"".join(map(self._bytes, ids[:-1])).decode()
            assert len(ids) < 5000


@pytest.fixture(scope="module")
def writer(tokenizer: Tokenizer) -> Writer:
    return Writer(tokenizer)


def asked(schema: Any) -> Grammar:
    return Grammar.from_json_schema(schema, SCHEMA)


@pytest.mark.parametrize("part", range(4))
def test_outputs_satisfy_five_hundred_random_schemas(writer: Writer, part: int) -> None:
    for seed in range(PART * part, PART * (part + 1)):
        schema = random_schema(seed)
        text = writer.write(asked(schema), seed)
        validator = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
        faults = [str(fault) for fault in validator.iter_errors(json.loads(text))]
        assert not faults, (seed, text, faults)


def test_an_output_may_take_all_forms_that_a_schema_leaves_open(writer: Writer) -> None:
    grammar = asked({"anyOf": [{"enum": ["a", "b"]}, {"type": "boolean"}, {"type": "null"}]})
    assert {writer.write(grammar, seed) for seed in range(100)} == {'"a"', '"b"', "true", "false", "null"}


def test_there_are_no_blanks_but_those_that_separate(writer: Writer) -> None:
    """Even if a model likes nothing better."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 3, "maxItems": 3}
    text = writer.write(asked(schema), 0, liked=lambda token: not token.strip())
    assert len(json.loads(text)) == 3
    assert text == json.dumps(json.loads(text))


@pytest.mark.parametrize(
    ("bounds", "outside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.6", "-0.1"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["0", "-0", "0.1", "-0.6"]),
        ({"exclusiveMinimum": 10, "exclusiveMaximum": 10.5}, ["10", "10.0", "10.5"]),
    ],
)
def test_excluded_bounds_are_kept(tokenizer: Tokenizer, bounds: dict[str, float], outside: list[str]) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size)

    def takes(text: str) -> bool:
        matcher = compiler.compile(asked({"type": "number", **bounds}).text)
        return bool(matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))) and matcher.is_accepting()

    assert not any(map(takes, outside))
    inside = (sum(bounds.values()) / 2, sum(bounds.values()) / 4 + min(bounds.values()) / 2)
    assert all(takes(str(number)) for number in inside)


def test_what_looks_like_bounds_in_a_constant_is_left_alone(writer: Writer) -> None:
    value = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    assert json.loads(writer.write(asked({"const": value}), 0)) == value


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
}
FUNCTIONS: list[tuple[str, Mapping[str, Any]]] = [("get_weather", WEATHER), ("now", {}), ("a-b_9", {"type": "object"})]


@pytest.mark.parametrize("format", ["hermes", "llama3"])
@pytest.mark.parametrize("parallel", [False, True])
def test_forced_calls_are_calls_with_right_arguments(writer: Writer, format: ToolFormatName, parallel: bool) -> None:
    grammar = tool_call_grammar(FUNCTIONS, format, parallel)
    counts, names = set(), set()
    for seed in range(40):
        parser = ReplyParser(format, reasoning=False)
        text = writer.write(grammar, seed)
        reply = collect([*parser.append(text), *parser.finish()])
        assert not reply.content, text
        counts.add(min(len(reply.tool_calls), 2))
        for call in reply.tool_calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            assert isinstance(arguments, dict)
            if call.name == "get_weather":
                assert jsonschema_rs.is_valid(WEATHER, arguments)
    assert counts == ({1, 2} if parallel else {1})
    assert names == {name for name, _ in FUNCTIONS}


@pytest.mark.parametrize("format", ["hermes", "llama3"])
def test_an_answer_in_json_beside_calls_may_begin_as_they_do(tokenizer: Tokenizer, format: ToolFormatName) -> None:
    calls = tool_call_grammar(FUNCTIONS, format, True)
    compiler = GrammarCompiler(tokenizer, tokenizer.eos_ids, tokenizer.vocab_size)

    def takes(grammar: Grammar, text: str) -> bool:
        ids = tokenizer.encode(text, add_special_tokens=False)
        matcher = compiler.compile(grammar.text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    key = TOOL_FORMATS[format].arguments_key
    call = f'{{"name": "get_weather", "{key}": {{"city": "Rome"}}}}'
    call = f"<tool_call>\n{call}\n</tool_call>" if format == "hermes" else call
    any_object = Grammar.either(Grammar.json_object("response_format"), calls)
    for text in ("{}", '{"a": 1}', '{"name": 3}', '{"name": "now", "other": {}}', '{"nam": "now"}', call):
        assert takes(any_object, text), text
    one = Grammar.either(asked({"properties": {"name": {"type": "string"}}, "type": "object"}), calls)
    assert [takes(one, text) for text in ('{"name": "x"}', call, '{"a": 1}')] == [True, True, False]


def format_asked(given: dict[str, Any]) -> Grammar | None:
    """The grammar of a chat's response_format. Raises ApiError."""
    try:
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": ""}], "response_format": given})
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors()]
        explained = explain_fault(RequestValidationError(faults, body={"response_format": given}))
        raise ApiError(400, explained.message, param=explained.param) from None
    return answer_grammar(body)


@pytest.mark.parametrize("strict", [{}, {"strict": None}, {"strict": True}, {"strict": False}])
def test_a_schema_holds_whether_or_not_it_is_strict(strict: dict[str, Any]) -> None:
    schema = {"type": "integer"}
    given = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "schema": schema, **strict}}
    assert format_asked(given) == asked(schema)


NAMED = {"name": "n", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "type"),
        ({"type": "yaml"}, "type"),
        ({"type": "text", "schema": {}}, "schema"),
        ({"type": "json_object", "json_schema": NAMED}, "json_schema"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_schema", "json_schema": [1]}, "json_schema"),
        ({"type": "json_schema", "json_schema": {**NAMED, "schemas": {}}}, "json_schema.schemas"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema.name"),
        ({"type": "json_schema", "json_schema": {**NAMED, "strict": "yes"}}, "json_schema.strict"),
        ({"type": "json_schema", "json_schema": {**NAMED, "description": 3}}, "json_schema.description"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {**NAMED, "schema": True}}, "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {**NAMED, "schema": {"x-guidance": {}}}}, "json_schema.schema"),
    ],
)
def test_a_wrong_response_format_names_the_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        format_asked(given)
    assert caught.value.status == 400
    assert caught.value.param == f"response_format.{param}"
    assert caught.value.message.startswith(f"response_format.{param}")


def test_a_deep_schema_is_refused_before_anything_recurses() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="nests deeper than") as caught:
        asked({"enum": deep})
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    "make",
    [lambda schema: asked(schema(4000)), lambda schema: tool_call_grammar([("f", schema(50))] * 100, "hermes", True)],
    ids=["one schema", "many functions"],
)
def test_schemas_that_are_too_long_are_refused_before_they_are_worked_on(
    make: Callable[[Callable[[int], dict[str, Any]]], Grammar], monkeypatch: pytest.MonkeyPatch
) -> None:
    def works(*_: object) -> None:
        raise AssertionError("it is worked on")

    monkeypatch.setattr("strata.serve.grammar.json_entry", works)
    with pytest.raises(ApiError, match="bytes of grammar, and at most 65,536 are taken") as caught:
        make(lambda size: {"properties": {f"p{place}": {"type": "string"} for place in range(size)}})
    assert caught.value.code == "invalid_grammar"


@asynccontextmanager
async def grammar_checker() -> AsyncIterator[GrammarChecker]:
    """A checker that is closed in the end."""
    checker = GrammarChecker()
    try:
        yield checker
    finally:
        checker.close()


def admission() -> AdmittedRequest:
    """Of one caller's requests."""
    return Limits(ServeSettings("model", ("model",)), 1).admit(Caller("alice", ""), 1, 1)


def text_of(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


IN_A_ROW = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(500)}
HOSTILE = {
    "intersection that explodes": {
        "allOf": [text_of(f".*{letter}.{{{n}}}.*") for n, letter in enumerate("abcdefghijklmnopqr")]
    },
    "product of divisors": {"type": "integer", "allOf": [{"multipleOf": prime} for prime in (97, 89, 83)]},
    "too many properties": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1500)}},
    "huge": {"enum": ["x" * 100_000]},
    "refers to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    # An engine's thread would run out of its stack, and with it the engine, where it is of 2 MiB.
    "definitions in a long row": {"$ref": "#/$defs/d0", "$defs": {**IN_A_ROW, "d500": {"type": "null"}}},
    "impossible": {"type": "integer", "minimum": 5, "maximum": 3},
    "no such definition": {"$ref": "#/$defs/missing"},
    "remote": {"$ref": "http://127.0.0.1:9/schema.json"},
    "look-around": text_of("(?=a)b"),
    "unfinished pattern": text_of("(a"),
    "unknown type": {"type": "text"},
    "unsupported keyword": {"type": "array", "uniqueItems": True},
}


async def test_hostile_schemas_are_refused_in_time_and_the_next_is_served() -> None:
    async with grammar_checker() as checker:
        for name, schema in HOSTILE.items():
            began = time.monotonic()
            with pytest.raises(ApiError) as caught:
                await checker.check(asked(schema), admission())
            assert time.monotonic() - began < 30, name  # the deadline is 2 s, and others use the machine
            error = caught.value
            assert (error.status, error.code, error.param) == (400, "invalid_grammar", SCHEMA), name
            assert "\n" not in error.message, name
            await checker.check(asked({"const": name}), admission())


@pytest.mark.parametrize(
    "schema",
    [
        text_of("^((a*)*)*$"),
        text_of("(.*a.{20}){3}"),
        text_of("(((a{1,100}){1,100}){1,100}){1,100}"),
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 10**9},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
    ],
)
def test_schemas_that_only_look_hostile_pass(schema: dict[str, Any]) -> None:
    assert what_is_wrong(asked(schema).text) is None


async def test_many_formats_of_strings_are_no_long_schema() -> None:
    """Each becomes a pattern of a thousand characters."""
    schema = {"type": "object", "properties": {f"p{number}": {"format": "uri"} for number in range(100)}}
    async with grammar_checker() as checker:
        await checker.check(asked(schema), admission())


def test_random_schemas_pass_the_check_that_they_pass_in_the_engine() -> None:
    wrong = {seed: what_is_wrong(asked(random_schema(seed)).text) for seed in range(1000, 1060)}
    assert set(wrong.values()) == {None}


async def test_what_was_found_is_remembered() -> None:
    """A remembered grammar does not wait behind one that is being tried."""
    async with grammar_checker() as checker:
        good, bad = asked({"type": "integer"}), asked({"uniqueItems": True})
        await checker.check(good, admission())
        with pytest.raises(ApiError):
            await checker.check(bad, admission())
        slow = asyncio.create_task(checker.check(asked(HOSTILE["product of divisors"]), admission()))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await checker.check(good, admission())
        with pytest.raises(ApiError):
            await checker.check(bad, admission())
        assert time.monotonic() - began < 0.5
        assert not slow.done()
        slow.cancel()


async def test_one_who_leaves_does_not_spoil_it_for_others() -> None:
    async with grammar_checker() as checker:
        grammar = asked({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}})
        leaving, staying = (asyncio.create_task(checker.check(grammar, admission())) for _ in range(2))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await staying


async def test_only_the_time_that_a_busy_machine_took_is_not_held_against_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def too_busy(_: object) -> dict[str, str]:
        return {"error": "it ran longer than 2 s"}

    async with grammar_checker() as checker:
        worker = checker._workers[0]
        ask = worker.ask
        monkeypatch.setattr(worker, "ask", too_busy)
        with pytest.raises(ApiError, match="takes too much to compile"):
            await checker.check(asked({"type": "integer"}), admission())
        monkeypatch.setattr(worker, "ask", ask)
        await checker.check(asked({"type": "integer"}), admission())
