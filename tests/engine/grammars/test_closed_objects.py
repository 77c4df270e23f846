"""Objects take no properties but those that their schema names, where it does not say; none becomes impossible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, Field

from strata.engine.grammars.structured_outputs import StructuredOutputsParams
from strata.serve.grammar_worker import TOKENIZER, what_is_wrong
from tests.serve.random_schemas import random_schema

TEXT = {"type": "string"}


def json_grammar(schema: Mapping[str, Any]) -> str:
    return StructuredOutputsParams(json=dict(schema)).to_grammar()


def takes(schema: Mapping[str, Any], text: str) -> bool:
    """Whether a text, its end included, can be written under a schema."""
    matcher = LLMatcher(TOKENIZER, json_grammar(schema), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Owner(BaseModel):
    name: str
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    other: Cat | Dog | None = None
    marks: dict[str, int] = {}
    friends: list[Owner] = []


def test_a_plain_pydantic_model_is_closed_at_every_depth() -> None:
    schema = Owner.model_json_schema()
    whole = {
        "name": "Ann",
        "pet": {"kind": "cat", "lives": 7},
        "other": {"kind": "dog", "tricks": ["sit"]},
        "marks": {"any name": 1},
        "friends": [{"name": "Bo", "pet": {"kind": "dog", "tricks": []}}],
    }
    assert Owner.model_validate(whole).friends[0].name == "Bo"
    assert takes(schema, json.dumps(whole))
    for place in (whole, whole["pet"], whole["other"], whole["friends"][0], whole["friends"][0]["pet"]):  # type: ignore[index]
        place["invented"] = 1
        assert not takes(schema, json.dumps(whole)), whole
        del place["invented"]


@pytest.mark.parametrize(
    ("schema", "right", "invented"),
    [
        (of(a=TEXT), {"a": "x"}, {"a": "x", "b": 1}),
        ({"properties": {"a": TEXT}}, {"a": "x"}, {"b": 1}),
        ({**of(a=TEXT), "patternProperties": {"^x": TEXT}}, {"a": "1", "x1": "2"}, {"y": "1"}),
        ({**of(a=TEXT), "required": ["a", "b"]}, {"a": "x", "b": [1]}, {"a": "x", "b": 1, "c": 1}),
        ({"allOf": [of(a=TEXT), of(b=TEXT)]}, {"a": "1", "b": "2"}, {"a": "1", "b": "2", "c": 3}),
        ({"allOf": [of(a=TEXT)], "description": "one"}, {"a": "1"}, {"b": "2"}),
        ({**of(a=TEXT), "anyOf": [of(b=TEXT), of(c=TEXT)]}, {"a": "1", "c": "2"}, {"a": "1", "d": "2"}),
        ({"anyOf": [of(a=TEXT), {"type": "null"}]}, {"a": "1"}, {"b": "1"}),
        ({"$ref": "#/$defs/A", "$defs": {"A": of(a=TEXT)}}, {"a": "1"}, {"b": "1"}),
        (
            {"$ref": "#/$defs/A", "properties": {"b": TEXT}, "$defs": {"A": {**of(a=TEXT), "required": ["a"]}}},
            {"a": "1", "b": "2"},
            {"a": "1", "b": "2", "c": "3"},
        ),
        (
            {"allOf": [{"$ref": "#/definitions/A"}, of(b=of(z=TEXT))], "definitions": {"A": of(a=TEXT)}},
            {"a": "1", "b": {"z": "2"}},
            {"a": "1", "b": {"z": "2", "y": "3"}},
        ),
        (of(a=of(a={"$ref": "#"})), {"a": {"a": {"a": {}}}}, {"a": {"a": {"b": {}}}}),
        ({"type": "array", "prefixItems": [of(a=TEXT)], "items": of(b=TEXT)}, [{"a": "1"}, {"b": "2"}], [{"b": "1"}]),
    ],
)
def test_named_properties_are_all_there_are(schema: dict[str, Any], right: Any, invented: Any) -> None:
    takes_right, takes_invented = (takes(schema, json.dumps(value)) for value in (right, invented))
    assert takes_right
    assert not takes_invented


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "required": ["z"]},
        {**of(a=TEXT), "additionalProperties": True},
        {**of(a=TEXT), "additionalProperties": {"type": "integer"}},
        {"allOf": [of(a=TEXT), {**of(b=TEXT), "additionalProperties": True}]},
        {**of(a=TEXT), "required": ["a"], "minProperties": 2},
        {"enum": [{"a": "x", "z": 1}], "properties": {"a": TEXT}},
        *(
            {**part, **said}
            for part in ({"allOf": [of(a=TEXT)]}, {"$ref": "#/$defs/A", "$defs": {"A": of(a=TEXT)}})
            for said in (
                {"additionalProperties": True},
                {"additionalProperties": {"type": "integer"}},
                {"required": ["z"]},
                {"required": ["a", "z"]},
                {"minProperties": 2, "required": ["a"]},
                {"const": {"a": "x", "z": 1}},
            )
        ),
        {"anyOf": [of(a=TEXT), of(b=TEXT)], "required": ["z"]},
        {"allOf": [of(a=TEXT), {"minProperties": 2, "required": ["a"]}]},
        {"allOf": [of(a=TEXT), {"const": {"a": "x", "z": 1}}]},
    ],
)
def test_what_is_said_to_be_open_stays_open(schema: dict[str, Any]) -> None:
    text = json.dumps({"a": "x", "z": 1})
    assert takes(schema, text) or takes(schema, json.dumps({"z": 1}))


def test_parts_that_each_describe_what_all_others_do_are_refused_before_they_multiply() -> None:
    many = {"anyOf": [of(**{f"c{place}": TEXT}) for place in range(300)]}
    objects = {f"p{place}": {**of(x=TEXT), "allOf": [{"$ref": "#/$defs/many"}]} for place in range(300)}
    assert '"c299":true' in json_grammar({**of(p0=objects["p0"]), "$defs": {"many": many}}).replace(" ", "")
    with pytest.raises(ValueError, match="describe the same objects: join some"):
        json_grammar({**of(**objects), "$defs": {"many": many}})


@pytest.mark.parametrize("schema", [{**of(a=TEXT), "additionalProperties": False}, of(), {"const": {"properties": {}}}])
def test_what_is_closed_or_no_schema_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert takes(schema, '{"properties": {}}' if "const" in schema else "{}")
    assert not takes(schema, '{"b": 1}')


@pytest.mark.parametrize("wrong", [5, "x", None, [1], {"a": 5}])
@pytest.mark.parametrize("keyword", ["properties", "patternProperties", "required", "allOf", "anyOf", "$ref", "$defs"])
def test_a_malformed_schema_is_left_to_the_compiler(keyword: str, wrong: Any) -> None:
    for around in ({}, of(a=TEXT), {"allOf": [of(a=TEXT), of(b=TEXT)]}):
        json_grammar({**around, keyword: wrong})


def test_a_long_chain_of_references_is_followed() -> None:
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(900)}
    schema = {"$defs": {**chain, "d900": of(a=TEXT)}, "allOf": [{"$ref": "#/$defs/d0"}, of(b=TEXT)]}
    assert '"open-900"' in json_grammar(schema)


def test_a_schema_is_left_open_once_however_its_references_are_spelled() -> None:
    spelled = [{"$ref": f"#/$defs/{name}"} for name in ("a", "%61", "%61%61", "a%61", "aa")]
    schema = {"$defs": {"a": of(a=TEXT), "aa": of(c=TEXT)}, "allOf": [*spelled, of(b=TEXT)]}
    assert json_grammar(schema).count('"open-') == 2
    assert takes(schema, '{"a": "2", "c": "3", "b": "1"}')


def test_random_schemas_joined_can_still_be_satisfied() -> None:
    """Where two schemas go together, they still do when both name their properties only."""
    for seed in range(60):
        extra = of(id={}, more=TEXT)
        joined = {"allOf": [random_schema(seed), extra], "$defs": random_schema(seed).get("$defs", {})}
        explicit = json.loads(json.dumps(joined))
        explicit["allOf"].append({"additionalProperties": True})  # which leaves the object open
        if what_is_wrong(json_grammar(explicit)) is None:
            assert what_is_wrong(json_grammar(joined)) is None, seed


def test_there_is_one_spacing() -> None:
    schema = of(a={"type": "array", "items": {"type": "integer"}}, b=of(c=TEXT))
    value = {"a": [1, 2], "b": {"c": "x"}}
    assert takes(schema, json.dumps(value))
    for text in (
        json.dumps(value, indent=1),
        json.dumps(value).replace("{", "{ "),
        json.dumps(value).replace(",", ",  "),
    ):
        assert not takes(schema, text)
