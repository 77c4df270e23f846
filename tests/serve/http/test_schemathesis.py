"""Schemathesis asks the API what its OpenAPI document allows and forbids, and holds the answers against the document.

Half of the cases cover the document (of each field its bounds, null, wrong types, too few, too many), half are random.
They are 200 unless the environment says another number; `-s` shows how many there were of each operation:

    STRATA_SCHEMATHESIS_CASES=2000 pytest -s tests/serve/http/test_schemathesis.py
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from schemathesis import BaseSchema, Case, CheckContext, HookContext, Response
from schemathesis.core.failures import Failure
from schemathesis.openapi.checks import RejectedPositiveData

from strata.serve.http.gate import OPEN_PATHS
from strata.serve.http.keys import KeyHash
from tests.serve.aim import Aim
from tests.serve.conftest import BUILTIN
from tests.serve.live import LiveServer, live_server

CASES = int(os.environ.get("STRATA_SCHEMATHESIS_CASES", "200"))
CASES_WITH_KEYS = CASES // 5
KEY = "sk-schemathesis"
SEED = 4

COVERING = 2800  # about so many cases cover the document
BODIES = 6  # operations that have one

# Of requests that the document allows, the faults that a schema cannot tell.
UNTOLD = re.compile(
    "has no tokens|there is a function .* already|which is not among the tools"
    r"|parameters\.(properties|required) must be|invalid_grammar|bad_words or logit_bias forbid"
    r"|you asked for [1-9]\d{3,} of prompt|may not administer the server",
    re.DOTALL,
)


def document_of(server: LiveServer, cases: int, key: str = "") -> BaseSchema:
    """What the server says of itself, about to be asked so many cases."""
    step = max(1, round(2 * COVERING / cases))
    drawn = max(cases // 2, cases - COVERING)
    config = {
        "seed": SEED,
        "output": {"sanitization": {"enabled": False}},
        "base-url": server.url,
        "max-stream-events": 1_000_000,
        "generation": {"database": "none"},
        "checks": {"positive_data_acceptance": {"expected-statuses": ["2xx", "404"]}},
        "phases": {
            "examples": {"fill-missing": True},
            "fuzzing": {"generation": {"max-examples": 1 + drawn // BODIES}},
        },
        "operations": [
            {
                "include-method": ["GET", "DELETE"],
                "phases": {"fuzzing": {"generation": {"max-examples": 2 + drawn // 50}}},
            }
        ],
    }
    text = server.client.get("/openapi.json", headers=bearing(key)).text
    document = json.loads(text, object_hook=without_mapping)
    for operations in document["paths"].values():
        for operation in operations.values():
            del operation["responses"]["default"]  # with it, every status is documented
    schema = schemathesis.openapi.from_dict(document, config=schemathesis.Config.from_dict(config))
    numbers = count()

    @schema.hook
    def filter_case(context: HookContext, case: Case) -> bool:
        return case.meta is None or case.meta.phase.name.value != "coverage" or next(numbers) % step == 0

    @schema.hook
    def filter_failure(context: HookContext, failure: Failure, case: Case, response: Response) -> bool:
        return not (isinstance(failure, RejectedPositiveData) and UNTOLD.search(response.text))

    schema.hook("map_case")(Aim(server, bearing(key)))
    return schema


def without_mapping(value: dict[str, Any]) -> dict[str, Any]:
    """Schemathesis takes each schema of a discriminator's mapping for one value, the last that leads to it."""
    return {name: one for name, one in value.items() if name != "mapping"}


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class Streams:
    """Holds streams against the document, of which Schemathesis checks no more than that events have data."""

    def __init__(self, document: BaseSchema) -> None:
        self._components = document.raw_schema["components"]
        self._validators: dict[str, Any] = {}

    def check_stream(self, context: CheckContext, response: Response, case: Case) -> None:
        """A stream has nothing but events of its schema, and says in the end that it is whole."""
        if "text/event-stream" not in response.headers.get("content-type", [""])[0]:
            return
        events = re.findall("^data: (.*)\n\n", response.text, re.M)
        assert len(events) == response.text.count("\n\n")
        if case.path == "/v1/responses":
            assert json.loads(events[-1])["type"] in ("response.completed", "response.incomplete")
            self._validate("ResponseObject", json.loads(events[-1])["response"])
        else:
            assert events.pop() == "[DONE]"
        documented = case.operation.definition.raw["responses"]["200"]["content"]["text/event-stream"]
        schema = documented["itemSchema"]["properties"]["data"]["anyOf"][0]["contentSchema"]["$ref"]
        for event in events:
            self._validate(schema.rpartition("/")[2], json.loads(event))

    def _validate(self, name: str, value: Any) -> None:
        if name not in self._validators:
            schema = {"$ref": f"#/components/schemas/{name}", "components": self._components}
            self._validators[name] = jsonschema_rs.validator_for(schema)
        self._validators[name].validate(value)


@pytest.fixture(autouse=True)
def _named_node(request: pytest.FixtureRequest) -> None:
    request.node._nodeid = request.node.nodeid  # Schemathesis 4.32 reads it, pytest 9.2 has it no more


@pytest.fixture(scope="module")
def open_document(live: LiveServer) -> BaseSchema:
    return document_of(live, CASES)


@pytest.fixture(scope="module")
def guarded_document() -> Iterator[BaseSchema]:
    with live_server(BUILTIN, [KeyHash.of("alice", KEY)], tool_format="hermes", priority_keys=("alice",)) as server:
        yield document_of(server, CASES_WITH_KEYS, KEY)


@pytest.fixture(scope="module")
def streams(open_document: BaseSchema) -> Streams:
    return Streams(open_document)


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """How many cases of each operation; in the end, whether they were enough. The first that fails is the last."""
    asked: Counter[str] = Counter()
    yield asked
    print(*(f"\n{number:6} {operation}" for operation, number in asked.items()), f"\n{asked.total():6} together")
    assert asked.total() >= CASES or request.session.testsfailed


open_schema = schemathesis.pytest.from_fixture("open_document")
guarded_schema = schemathesis.pytest.from_fixture("guarded_document")


@open_schema.parametrize()
def test_answers_are_as_the_document_says(case: Case, streams: Streams, asked: Counter[str]) -> None:
    asked[case.operation.label] += 1
    case.call_and_validate(additional_checks=[streams.check_stream])


@guarded_schema.parametrize()
def test_nothing_is_answered_without_a_key(case: Case, streams: Streams) -> None:
    case.call_and_validate(headers=bearing(KEY), additional_checks=[streams.check_stream])
    if case.path not in OPEN_PATHS:
        for headers in ({}, bearing(KEY[:-1])):
            refused = case.call(headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
