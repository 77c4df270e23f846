"""Objects take no properties but those that their schema names, where it does not say; none becomes impossible.
Formats of strings: what is taken is what libraries that know them take; one that nobody knows asserts nothing."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from llguidance import LLMatcher
from pydantic import BaseModel, Field

from strata.engine.grammars.limits import LIMITS
from strata.engine.grammars.structured_outputs import StructuredOutputsParams, join_entries, json_entry
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


@cache
def matcher_of(schema: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, join_entries(json_entry("json", json.loads(schema))), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes_value(schema: dict[str, Any], value: Any) -> bool:
    matcher = matcher_of(json.dumps(schema)).deep_copy()
    ids = list(json.dumps(value, ensure_ascii=False).encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def is_date(text: str) -> bool:
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return False
    with contextlib.suppress(ValueError):
        # Python has no year 0, which is as long as the year 4.
        datetime.date.fromisoformat(text.replace("0000-", "0004-", 1))
        return True
    return False


def is_time(text: str) -> bool:
    """A leap second is one of UTC; Python knows none, and takes hour 24 in newer versions."""
    parts = re.fullmatch(r"([0-9]{2}:[0-9]{2}):([0-9]{2})(\.[0-9]+)?([zZ]|[+-][0-9]{2}:[0-9]{2})", text)
    if parts is None or parts[1].startswith("24"):
        return False
    minute, second, _, offset = parts.groups()
    utc = offset in ("z", "Z", "+00:00", "-00:00")
    if second == "60" and not (minute == "23:59" and utc):
        return False
    with contextlib.suppress(ValueError):
        datetime.time.fromisoformat(f"{minute}:{'59' if second == '60' else second}")
        return utc or datetime.time.fromisoformat(offset[1:]) is not None
    return False


def is_moment(text: str) -> bool:
    return len(text) > 10 and text[10] in "tT" and is_date(text[:10]) and is_time(text[11:])


def is_address(kind: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        if not text.isascii() or "%" in text:  # a zone is none of the address
            return False
        with contextlib.suppress(ValueError):
            return kind(text) is not None
        return False

    return check


def is_uuid(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return str(uuid.UUID(text)) == text.lower()
    return False


def by_jsonschema(format: str) -> Callable[[str], bool]:
    validator = jsonschema_rs.Draft202012Validator({"format": format}, validate_formats=True)
    return lambda text: bool(validator.is_valid(text))


KNOWN: dict[str, tuple[Callable[[str], bool], list[str]]] = {
    "date": (is_date, ["2024-02-29", "2023-02-28", "2000-02-29", "1900-03-01", "0000-12-31", "1999-11-30"]),
    "time": (is_time, ["23:59:59Z", "00:00:00.125+05:30", "23:59:60z", "23:59:60.5-00:00", "12:30:45-23:59"]),
    "date-time": (is_moment, ["2024-02-29T23:59:60Z", "1985-04-12t23:20:50.52z", "2000-02-29T00:00:00+14:00"]),
    "duration": (by_jsonschema("duration"), ["P1Y2M3DT4H5M6S", "PT36H", "P4W", "P23DT23H", "PT5M", "P2M10D"]),
    "email": (
        by_jsonschema("email"),
        ["a@b", "john.doe+x@mail.example.com", "!#$%&'*+-/=?^_`{|}~@a-1.b", "x@[1.2.3.4]"],
    ),
    "hostname": (
        by_jsonschema("hostname"),
        ["a", "www.example.com", "1a-b.c2", f"{'a' * 63}.b", ".".join(["ab"] * 80)],
    ),
    "ipv4": (is_address(ipaddress.IPv4Address), ["0.0.0.0", "255.249.199.10", "127.0.0.1", "192.168.100.99"]),
    "ipv6": (
        is_address(ipaddress.IPv6Address),
        [
            *("::", "::1", "1::", "2001:db8::8a2e:370:7334", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::"),
            *("1::8", "1:2:3:4:5:6:10.0.0.255", "a:b::c:d:1.2.3.4", "::2:3:4:5:6:7:8", "1:2::4:5:6:7:8"),
        ],
    ),
    "uri": (
        by_jsonschema("uri"),
        [
            *("http://www.example.com:80/a/b%20c?q=1&r=/?#f", "urn:isbn:0451450523", "mailto:a@b.c", "a+b-c.d:", "x:/"),
            *(
                "ftp://u:p@[::1]:2/;x=",
                "file:///etc/hosts",
                "http://[v7.a:b]/",
                "http://[::ffff:1.2.3.4]",
                "tel:+1-816",
            ),
        ],
    ),
    "uuid": (is_uuid, ["00000000-0000-0000-0000-000000000000", "2EB8AA08-AA98-11EA-b4aa-73b441d16380"]),
}


def mutated(text: str, chance: random.Random) -> str:
    """The text with one to three of its characters changed, most of them to such as it has."""
    alphabet = text + "0123456789" * 2 + '-:.Tt@%/?#[]+PDHMSYWzZagf~_ \\é"\n'
    characters = list(text)
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(characters) + 1)
        what = chance.choice(["replace", "replace", "replace", "insert", "remove"])
        characters[place : place + (what != "insert")] = "" if what == "remove" else chance.choice(alphabet)
    return "".join(characters)


@pytest.mark.parametrize("format", KNOWN)
def test_what_is_taken_is_what_others_take(format: str) -> None:
    is_right, samples = KNOWN[format]
    schema = {"type": "string", "format": format}
    chance = random.Random(format)
    texts = [*samples, *(mutated(chance.choice(samples), chance) for _ in range(1500)), ""]
    if format in ("email", "hostname"):  # RFC 5890 keeps names like ab--c for later, RFC 1123 does not
        texts = [text for text in texts if "--" not in text]
    assert all(is_right(text) for text in samples)
    assert {text for text in texts if takes_value(schema, text)} == {text for text in texts if is_right(text)}


def test_each_day_of_four_hundred_years() -> None:
    schema = {"type": "string", "format": "date"}
    days = [
        f"{year:04}-{month:02}-{day:02}"
        for year in range(1600, 2000, 3)
        for month in (1, 2, 4, 12)
        for day in (28, 29, 30, 31)
    ]
    days += [f"{year:04}-02-29" for year in range(10_000)]
    assert [day for day in days if takes_value(schema, day)] == [day for day in days if is_date(day)]


@pytest.mark.parametrize(
    ("format", "wrong"),
    [
        ("date", ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-10", "2024-1-1"]),
        ("time", ["24:00:00Z", "12:00:60Z", "22:59:60+01:00", "12:00:00", "12:00Z", "12:00:00+24:00", "1:00:00Z"]),
        ("date-time", ["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z", "2024-01-01T24:00:00Z"]),
        ("duration", ["P", "PT", "P1YT", "P1Y1W", "P1S", "P1Y3D", "1Y", "p1y", "P1.5Y"]),
        ("email", ["a", "a@", "@b", "a..b@c", ".a@c", "a b@c", f"a@{'b' * 64}", f"{'a' * 65}@b", "a@-b", "a@b."]),
        ("hostname", ["", "-a", "a-", "a..b", "a_b", "é", f"{'a' * 64}", ".".join(["abc"] * 64), "a."]),
        ("ipv4", ["1.2.3", "1.2.3.256", "01.2.3.4", "1.2.3.4.5"]),
        ("ipv6", ["1::2::3", ":::", "1:2:3:4:5:6:7", "12345::", "::1.2.3", "1:2:3:4:5:6:7:1.2.3.4", "::1%eth0"]),
        ("uri", ["/a", "http://a b", "http://[1::2::3]/", "a", "1a:b", "http://a:b:c", "x:%zz", "http://a\\b"]),
        ("uuid", ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638", "{}"]),
    ],
)
def test_what_is_none(format: str, wrong: list[str]) -> None:
    assert not [text for text in wrong if takes_value({"type": "string", "format": format}, text)]


@pytest.mark.parametrize("format", ["phone", "", "regex", "idn-email", "iri", "json-pointer", "my own", "unknown"])
def test_a_format_that_is_not_known_asserts_nothing(format: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "format": format, "maxLength": 4}},
        "required": ["a"],
    }
    assert what_is_wrong(join_entries(json_entry("json", schema))) is None
    assert takes_value(schema, {"a": "any"})
    assert not takes_value(schema, {"a": "too long"})


def test_a_format_holds_beside_all_else_that_a_schema_says() -> None:
    schema = {"type": "string", "format": "date", "pattern": "^20", "maxLength": 10, "allOf": [{"pattern": "[13579]$"}]}
    assert takes_value(schema, "2024-02-29")
    for other in ("1999-12-31", "2024-02-28", "2023-02-29", "20"):
        assert not takes_value(schema, other), other


def test_a_format_says_something_of_strings_alone() -> None:
    assert [takes_value({"format": "date"}, value) for value in (3, None, "2024-02-29", "x")] == [
        True,
        True,
        True,
        False,
    ]
    assert takes_value({"type": ["integer", "string"], "format": "ipv4"}, 5)


def test_what_only_looks_like_a_format_is_left_alone() -> None:
    schema = {"const": {"format": "date", "type": "string"}}
    assert takes_value(schema, {"format": "date", "type": "string"})
    named = {"type": "object", "properties": {"format": {"type": "string", "format": "uuid"}}, "required": ["format"]}
    assert takes_value(named, {"format": str(uuid.UUID(int=1))})
    assert not takes_value(named, {"format": "date"})


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "properties", "format"])
def test_properties_and_definitions_may_be_called_as_keywords_are(name: str) -> None:
    number = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    for value, right, wrong in (
        ({"type": "string", "format": "date"}, "2023-02-28", "2023-02-29"),
        ({"type": "string", "format": "nobody-knows-it"}, "2023-02-29", 5),
        (number, 0.25, 0),
    ):
        schema = {"type": "object", "properties": {name: value}, "required": [name]}
        assert (takes_value(schema, {name: right}), takes_value(schema, {name: wrong})) == (True, False)
        defined = {"$ref": f"#/$defs/{name}", "$defs": {name: value}}
        assert (takes_value(defined, right), takes_value(defined, wrong)) == (True, False)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]},
        {"type": "number", "minimum": 1e300},
        {"type": "string", "pattern": "^a", "format": "date"},
        {"$ref": "http://example.com/schema.json"},
        {"type": "object", "properties": {f"p{number}": {} for number in range(2500)}},
    ],
)
def test_what_is_wrong_is_told_without_options_of_a_library(schema: dict[str, Any]) -> None:
    wrong = what_is_wrong(join_entries(json_entry("json", schema)))
    assert wrong is not None
    library = r"coerce|x-guidance|lenient|option|limit \d|Regex|And \(|lexeme|registry|retriever|Some\("
    assert not re.search(library, wrong), wrong
