"""/v1/responses: what a client sends becomes a prompt, what the model writes becomes items and events, and is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx2
import openai
import pytest
from openai.types.responses import ResponseErrorEvent

from strata.engine.process.messages import Delta, TokenLogprobs
from strata.serve.api.response_store import ResponseStore, StoredResponse
from strata.serve.client import EngineGone
from strata.serve.schema.responses_reply import ResponseObject, ResponseStreamEvent
from strata.text.tokenizer import Tokenizer
from tests.serve.conftest import BUILTIN
from tests.serve.scripted import EOS, Scripted, Serve, delta

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}(call {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}{% if tools %}tools: {{ tools | tojson }}{% endif %}[assistant]"
)


@pytest.fixture
def written(tokenizer: Tokenizer) -> Callable[..., list[Sequence[Delta]]]:
    """What an engine says of a reply: a token at a step, then its end."""

    def script(text: str, reason: str = "stop") -> list[Sequence[Delta]]:
        steps: list[Sequence[Delta]] = [[delta(0, [id])] for id in tokenizer.encode(text, add_special_tokens=False)]
        return [*steps, [delta(0, [EOS] if reason == "stop" else [], reason)]]

    return script


@pytest.fixture(scope="module")
def templated() -> Iterator[Tokenizer]:
    """One whose template shows everything."""
    with Tokenizer.load(BUILTIN, chat_template=TEMPLATE) as tokenizer:
        yield tokenizer


def post(served: Scripted, status: int = 200, **body: Any) -> Any:
    return served.post("/v1/responses", status, **{"input": "Hi", **body})


def stream(served: Scripted, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which bears its own name and number."""
    response = served.client.post("/v1/responses", json={"input": "Hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    told = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        ResponseStreamEvent.model_validate(event)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        told.append(event)
    return told


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    output = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in body["output"]]
    return {**body, "id": "", "output": output, "created_at": 0, "completed_at": 0}


def prompt_of(served: Scripted) -> str:
    return served.state.tokenizer.decode(served.engine.added[-1].prompt, skip_special_tokens=False)


def test_a_text_is_answered_with_a_message(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script(written("It is 85.")) as served:
        body = post(served, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=20)
    ResponseObject.model_validate(body)
    (item,) = body["output"]
    assert item["content"][0]["text"] == "It is 85."
    assert (item["role"], item["status"], body["status"]) == ("assistant", "completed", "completed")
    assert (body["instructions"], body["metadata"], body["temperature"]) == ("Be brief.", {"a": "b"}, 0.5)
    usage = body["usage"]
    assert usage["input_tokens"] == len(served.engine.added[0].prompt)
    assert usage["output_tokens"] == len(written("It is 85."))
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert served.engine.added[0].params.max_tokens == 20
    assert prompt_of(served) == "<|begin|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("text", "reason"), [("It is 85.", "stop"), ("It is", "length"), (f"Well.\n{CALL}\n{CALL}", "stop"), ("", "stop")]
)
def test_a_stream_adds_up_to_the_whole_answer(
    serve_script: Serve, written: Callable[..., Any], text: str, reason: str
) -> None:
    asked = {"tools": [ADD], "stream": False}
    with serve_script(written(text, reason), settings={"tool_format": "hermes"}) as served:
        whole = post(served, **asked)
        events = stream(served, **{**asked, "stream": True})
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert whole["status"] == ("completed" if reason == "stop" else "incomplete")
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == (
        events[-1]["response"]["output"]
    )
    for index, item in enumerate(events[-1]["response"]["output"]):
        own = [event for event in events if event.get("output_index") == index]
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}


def test_calls_are_items_of_their_own(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script(written(f"Well.\n{CALL}\n{CALL}"), settings={"tool_format": "hermes"}) as served:
        several = post(served, tools=[ADD])["output"]
        one = post(served, tools=[ADD], parallel_tool_calls=False)["output"]
        none = post(served, tools=[ADD], tool_choice="none")["output"]
    assert [item["type"] for item in several] == ["message", "function_call", "function_call"]
    assert [(item["name"], json.loads(item["arguments"])) for item in several[1:]] == [("add", {"a": 1})] * 2
    assert several[1]["call_id"] != several[2]["call_id"]
    assert [item["type"] for item in one] == ["message", "function_call"]
    assert none[0]["content"][0]["text"] == f"Well.\n{CALL}\n{CALL}"


def test_arguments_are_streamed_as_they_are_written(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script(written(CALL), settings={"tool_format": "hermes"}) as served:
        events = stream(served, tools=[ADD])
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == '{"a": 1}'


def test_reasoning_is_an_item_of_its_own(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script(written("<think>\nOne and one.\n</think>\n\nTwo."), settings={"reasoning": True}) as served:
        body = post(served)
        events = stream(served)
    ResponseObject.model_validate(body)
    thought, said = body["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "One and one."}]
    assert said["content"][0]["text"] == "Two."
    details = body["usage"]["output_tokens_details"]
    assert 0 < details["reasoning_tokens"] < body["usage"]["output_tokens"]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "One and one."


def test_a_conversation_goes_on_from_what_was_kept(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script(written("Two.")) as served:
        first = post(served, input="One and one?", instructions="Not carried over.")["id"]
        second = post(served, input="And one?", previous_response_id=first)
        assert prompt_of(served) == (
            "<|begin|><|user|>One and one?<|end|><|assistant|>Two.<|end|><|user|>And one?<|end|><|assistant|>"
        )
        assert second["previous_response_id"] == first
        third = stream(served, input="And?", previous_response_id=second["id"])[-1]["response"]["id"]
        assert served.client.get(f"/v1/responses/{third}").json()["id"] == third
        assert served.client.get(f"/v1/responses/{second['id']}").json() == second
        gone = served.client.delete(f"/v1/responses/{first}")
        assert gone.json() == {"id": first, "object": "response", "deleted": True}
        assert served.client.get(f"/v1/responses/{first}").status_code == 404
        assert served.client.delete(f"/v1/responses/{first}").status_code == 404
        post(served, input="Still?", previous_response_id=third)
        assert prompt_of(served).count("Two.") == 3


def test_what_is_not_to_be_kept_is_not(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script(written("Two.")) as served:
        body = post(served, store=False)
        assert body["store"] is False
        assert served.client.get(f"/v1/responses/{body['id']}").status_code == 404
        error = post(served, 404, previous_response_id=body["id"])["error"]
    assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")


def test_several_workers_keep_nothing_and_say_so(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script(written("Two."), settings={"api_workers": 2}) as served:
        assert post(served)["store"] is False
        for asked in ({"store": True}, {"previous_response_id": "resp_1"}):
            error = post(served, 400, **asked)["error"]
            assert "--api-workers" in error["message"]
            assert error["param"] in asked
        assert served.client.get("/v1/responses/resp_1").status_code == 400


def test_calls_and_their_outputs_go_back_to_the_model(
    serve_script: Serve, written: Callable[..., Any], templated: Tokenizer
) -> None:
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+1"}, {"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "id": "fc_1"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "broken"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
    ]
    with serve_script(written(CALL), settings={"tool_format": "hermes"}) as served:
        served.state.tokenizer = templated
        body = post(served, input=given, tools=[ADD])
        assert prompt_of(served).startswith(
            '[system]Be brief.[user]1+1\n?[assistant]<hm>So(call add {"a": 1})(call add "broken")[tool]2[tool]no'
        )
        assert '"name": "add"' in prompt_of(served)
        done = {"type": "function_call_output", "call_id": body["output"][0]["call_id"], "output": "2"}
        post(served, input=[done], previous_response_id=body["id"])
        assert prompt_of(served).endswith('[tool]no[assistant](call add {"a": 1})[tool]2[assistant]')


def test_what_the_model_wrote_can_be_sent_back_as_it_came(
    serve_script: Serve, written: Callable[..., Any], templated: Tokenizer
) -> None:
    settings = {"tool_format": "hermes", "reasoning": True}
    with serve_script(written(f"<think>hm</think>So{CALL}"), settings=settings) as served:
        served.state.tokenizer = templated
        output = post(served, tools=[ADD])["output"]
        post(served, input=[{"role": "user", "content": "Hi"}, *output])
        assert prompt_of(served) == '[user]Hi[assistant]<hm>So(call add {"a": 1})[assistant]'


def test_truncation_drops_the_oldest_that_do_not_fit(
    serve_script: Serve, written: Callable[..., Any], templated: Tokenizer
) -> None:
    turns = [
        turn
        for number in range(100)
        for turn in (
            {"role": "user", "content": f"{number} " + "word " * 10},
            {"role": "assistant", "content": f"({number})"},
        )
    ]
    given = [{"role": "system", "content": "Rule."}, *turns, {"role": "user", "content": "last"}]
    with serve_script(written("So.")) as served:
        served.state.tokenizer = templated
        assert post(served, 400, input=given)["error"]["code"] == "context_length_exceeded"
        post(served, input=given, truncation="auto", max_output_tokens=100)
        prompt, tokens = prompt_of(served), len(served.engine.added[-1].prompt)
        first = int(prompt.removeprefix("[system]Rule.[user]").split(" ")[0])
        assert prompt.endswith("[user]last[assistant]")
        turn = len(templated.encode(f"[user]{first} " + "word " * 10 + f"[assistant]({first})"))
        assert 924 - turn < tokens <= 924  # of 1024, and not a turn less than could be
        alone = {"role": "user", "content": "word " * 2000}
        assert post(served, 400, input=[alone], truncation="auto")["error"]["code"] == "context_length_exceeded"


def test_log_probabilities_come_with_the_text_they_belong_to(serve_script: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One two three", add_special_tokens=False)
    steps = [[delta(0, [id], logprobs=[TokenLogprobs(id, -0.5, 1, [id, 5], [-0.5, -2.0])])] for id in ids]
    end = [delta(0, [EOS], "stop", logprobs=[TokenLogprobs(EOS, -0.1, 1, [EOS, 5], [-0.1, -2.0])])]
    with serve_script([*steps, end]) as served:
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        (item,) = post(served, **asked)["output"]
        events = stream(served, **asked)
        assert served.engine.added[-1].params.logprobs == 2
    told = item["content"][0]["logprobs"]
    assert "".join(one["token"] for one in told) == "One two three"
    assert [len(one["top_logprobs"]) for one in told] == [2] * len(ids)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [one for event in deltas for one in event["logprobs"]] == told
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == told


def test_a_forced_call_and_a_format_become_grammars(serve_script: Serve, written: Callable[..., Any]) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    with serve_script(written("{}"), settings={"tool_format": "hermes", "reasoning": True}) as served:
        post(served)
        post(served, text={"format": {"type": "json_object"}})
        body = post(served, text={"format": form})
        assert body["output"][0]["content"][0]["text"] == "{}"
        assert body["text"]["format"] == form
        post(served, tools=[ADD], tool_choice="required")
        post(served, tools=[ADD], tool_choice={"type": "function", "name": "add"})
        grammars = [add.grammar for add in served.engine.added]
        assert grammars[0] is None
        assert all(grammars[1:])


def test_an_engine_that_dies_ends_a_stream_with_an_error(serve_script: Serve, written: Callable[..., Any]) -> None:
    with serve_script([*written("One two")[:2], EngineGone("killed")]) as served:
        events = stream(served)
        assert post(served, 503)["error"]["code"] == "engine_dead"
        assert served.client.get(f"/v1/responses/{events[0]['response']['id']}").status_code == 404
    failed, error = events[-2:]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    ResponseObject.model_validate(failed["response"])
    assert error["type"] == "error"
    assert error["code"] == error["error"]["code"] == "engine_dead"
    ResponseErrorEvent.model_validate(error)


def test_an_error_before_the_first_token_has_a_status_of_its_own(serve_script: Serve) -> None:
    with serve_script([EngineGone("killed")]) as served:
        assert post(served, 503, stream=True)["error"]["code"] == "engine_dead"


def ask(served: Scripted, use: Callable[[openai.AsyncOpenAI], Any]) -> Any:
    """What `use` makes of OpenAI's own client."""

    async def run() -> Any:
        transport = httpx2.ASGITransport(served.client.app)
        async with httpx2.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(api_key="-", base_url="http://127.0.0.1/v1", http_client=http, max_retries=0)
            return await use(client)

    return asyncio.run(run())


def test_openais_client_reads_the_stream(serve_script: Serve, written: Callable[..., Any]) -> None:
    tools: Any = [{**ADD, "strict": True}]

    async def use(client: openai.AsyncOpenAI) -> Any:
        async with client.responses.stream(model="scripted", input="Hi", tools=tools) as told:
            kinds = [event.type async for event in told]
            return kinds, await told.get_final_response()

    with serve_script(written(f"Well. {CALL}"), settings={"tool_format": "hermes"}) as served:
        kinds, final = ask(served, use)
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == "Well."
    assert final.output[1].parsed_arguments == {"a": 1}


def test_openais_client_raises_when_a_stream_fails(serve_script: Serve, written: Callable[..., Any]) -> None:
    async def use(client: openai.AsyncOpenAI) -> list[str]:
        kinds: list[str] = []
        events: AsyncIterator[Any] = await client.responses.create(model="scripted", input="Hi", stream=True)
        try:
            async for event in events:
                kinds.append(event.type)
        except openai.APIError as error:
            kinds.append(error.message)
        return kinds

    with serve_script([*written("One two")[:2], EngineGone("killed")]) as served:
        *_, failed, message = ask(served, use)
    assert failed == "response.failed"
    assert "the engine is gone" in message


def stored(size: int) -> StoredResponse:
    return StoredResponse({"text": "x" * size}, [])


def test_the_store_makes_room_by_count_and_by_bytes() -> None:
    store = ResponseStore(most=3, max_bytes=10_000)
    for number in range(3):
        store.put("a", str(number), stored(10))
    assert store.get("a", "0") == stored(10)  # used, so that 1 is the oldest
    store.put("a", "3", stored(10))
    assert [store.get("a", str(number)) is not None for number in range(4)] == [True, False, True, True]
    store.put("a", "large", stored(9_980))
    assert store.get("a", "3") is None
    assert store.get("a", "large") is not None
    assert not store.put("a", "too large", stored(10_000))
    assert store.get("a", "large") is not None


def test_callers_neither_find_nor_push_out_each_others_responses() -> None:
    store = ResponseStore(most=2, max_bytes=10_000)
    store.put("a", "1", stored(10))
    for number in range(5):
        store.put("b", str(number), stored(10))
    assert store.get("b", "1") is None
    assert not store.delete("b", "1")
    assert store.get("a", "1") is not None
    assert store.delete("a", "1")
    assert store.get("a", "1") is None
