"""Records of TRL and ShareGPT: what each is made of, and what of it is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document
from strata.train.data.records import encode_record, kind_of
from strata.train.data.shards import TokenDataset
from strata.train.data.tokenize import tokenize
from tests.train.samples import sample, template, write_lines

SYSTEM = {"role": "system", "content": "the box"}
ASKS, ANSWERS = {"role": "user", "content": "quick?"}, {"role": "assistant", "content": "brown fox"}
OTHER = {"role": "assistant", "content": "lazy dog"}
TURNS = [SYSTEM, ASKS, ANSWERS, {"role": "user", "content": "lazy?"}, {"role": "assistant", "content": "dog"}]
ALPACA = {"instruction": "quick?", "input": "", "output": "brown fox"}
SHARED = [
    {"from": "system", "value": "the box"},
    {"from": "human", "value": "quick?"},
    {"from": "gpt", "value": "brown fox"},
    {"from": "human", "value": "lazy?"},
    {"from": "gpt", "value": "dog"},
]


def documents(tokenizer: Tokenizer, record: dict[str, Any]) -> list[Document]:
    return encode_record(tokenizer, kind_of(record), record)


def read(tokenizer: Tokenizer, record: dict[str, Any]) -> list[tuple[str, str]]:
    """Of each document its whole text and what of it is wanted."""
    return [
        tuple(
            tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in (one.tokens, one.tokens[one.loss_mask])
        )
        for one in documents(tokenizer, record)
    ]


def test_a_completion_of_a_text_is_learned_with_its_end_and_the_prompt_is_not(tokenizer: Tokenizer) -> None:
    record = {"prompt": "the quick", "completion": " brown fox", "id": 7}
    assert kind_of(record) == "chat"
    (document,) = documents(tokenizer, record)
    prompt, both = tokenizer.encode("the quick"), tokenizer.encode("the quick brown fox")
    assert document.tokens.tolist() == [*both, tokenizer.eos_ids[0]]
    assert document.loss_mask.tolist() == [False] * len(prompt) + [True] * (len(both) - len(prompt) + 1)
    (whole,) = documents(tokenizer, {"prompt": "", "completion": "fox"})
    assert not whole.loss_mask[0]
    assert whole.loss_mask[1:].all()


def test_a_token_of_prompt_and_completion_together_is_learned(tokenizer: Tokenizer) -> None:
    whole = "the quick"
    ids = tokenizer.encode(whole)
    at = next(at for at in range(1, len(whole)) if tokenizer.encode(whole[:at])[-1] not in ids)
    (document,) = documents(tokenizer, {"prompt": whole[:at], "completion": whole[at:]})
    assert document.tokens.tolist()[:-1] == ids
    same = [one == other for one, other in zip(tokenizer.encode(whole[:at]), ids, strict=False)]
    assert document.loss_mask.tolist().index(True) == max(1, same.index(False))


def test_a_completion_of_messages_is_learned_and_turns_of_the_prompt_are_not(tokenizer: Tokenizer) -> None:
    record = {"prompt": TURNS[:4], "completion": TURNS[4:]}
    assert kind_of(record) == "chat"
    ((text, wanted),) = read(tokenizer, record)
    assert text == read(tokenizer, {"messages": TURNS})[0][0]
    assert wanted == "dog<|end|>"


def test_sharegpt_is_the_chat_that_it_says(tokenizer: Tokenizer) -> None:
    chat = read(tokenizer, {"messages": TURNS})
    assert [wanted for _, wanted in chat] == ["brown fox<|end|>dog<|end|>"]
    record = {"id": "identity_0", "conversations": SHARED}
    assert kind_of(record) == "chat"
    assert read(tokenizer, record) == chat
    assert read(tokenizer, {"system": "the box", "conversations": SHARED[1:]}) == chat
    assert read(tokenizer, {"messages": SHARED}) == chat
    assert read(tokenizer, {"conversations": TURNS}) == chat


def test_results_of_tools_are_read_and_not_learned(folder: Path) -> None:
    result = {"from": "tool", "value": "five"}
    record = {"conversations": [*SHARED[1:3], result, SHARED[4]]}
    offered = "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    with Tokenizer.load(folder, template(before=offered)) as tokenizer:
        ((text, wanted),) = read(tokenizer, record)
        assert "tool" in text
        assert "five" in text
        assert wanted == "brown fox<|end|>dog<|end|>"
        tools = [{"type": "function", "function": {"name": "jumps"}}]
        for given in (tools, json.dumps(tools)):
            ((with_tools, learned),) = read(tokenizer, record | {"tools": given})
            assert (with_tools, learned) == ("jumps;" + text, wanted)


def test_preferences_of_every_shape(tokenizer: Tokenizer) -> None:
    expected = read(tokenizer, {"prompt": [ASKS], "chosen": [ANSWERS], "rejected": [OTHER]})
    assert [wanted for _, wanted in expected] == ["brown fox<|end|>", "lazy dog<|end|>"]
    prompt = tokenizer.encode_chat([ASKS])
    for document in documents(tokenizer, {"prompt": "quick?", "chosen": "brown fox", "rejected": [OTHER]}):
        assert document.tokens[: len(prompt)].tolist() == prompt
    for record in (
        {"prompt": "quick?", "chosen": "brown fox", "rejected": [OTHER]},
        {"chosen": [ASKS, ANSWERS], "rejected": [ASKS, OTHER]},
        {"prompt": "quick?", "chosen": [ASKS, ANSWERS], "rejected": [ASKS, OTHER]},
        # As LLaMA-Factory has them.
        {
            "instruction": None,
            "conversations": [SHARED[1]],
            "chosen": {"from": "gpt", "value": "brown fox"},
            "rejected": {"from": "gpt", "value": "lazy dog"},
        },
        {"chosen": SHARED[1:3], "rejected": [SHARED[1], {"from": "gpt", "value": "lazy dog"}]},
    ):
        assert kind_of(record) == "preference"
        assert read(tokenizer, record) == expected
    # What stands beside a conversation is said in this one too, and is the same where that has it already.
    with_system = read(tokenizer, {"prompt": [SYSTEM, ASKS], "chosen": [ANSWERS], "rejected": [OTHER]})
    for record in (
        {"system": "the box", "prompt": "quick?", "chosen": "brown fox", "rejected": "lazy dog"},
        {"system": "the box", "instruction": "quick?", "chosen": "brown fox", "rejected": "lazy dog"},
        {"system": "the box", "chosen": [ASKS, ANSWERS], "rejected": [ASKS, OTHER]},
        {"system": "dog", "chosen": [SYSTEM, ASKS, ANSWERS], "rejected": [SYSTEM, ASKS, OTHER]},
    ):
        assert read(tokenizer, record) == with_system
    # Replies may be alike, as texts and in conversations.
    alike = read(tokenizer, {"prompt": "quick?", "chosen": "brown fox", "rejected": "brown fox"})
    assert alike == read(tokenizer, {"chosen": [ASKS, ANSWERS], "rejected": [ASKS, ANSWERS]}) == [expected[0]] * 2
    # Assistant turns of the prompt are context, not what is preferred.
    chosen, _ = read(tokenizer, {"prompt": TURNS[:4], "chosen": "yes", "rejected": "no"})
    assert chosen[1] == "yes<|end|>"


def test_a_system_message_beside_prompt_and_completion_is_read(tokenizer: Tokenizer) -> None:
    record = {"system": "the box", "prompt": [ASKS], "completion": [ANSWERS]}
    assert read(tokenizer, record) == read(tokenizer, {"messages": TURNS[:3]})


@pytest.mark.parametrize(
    ("record", "same"),
    [
        # As Parquet, and what writes JSON from it, have the columns of other rows.
        ({"messages": TURNS, "text": None, "prompt": None, "completion": None, "chosen": None}, {"messages": TURNS}),
        ({"instruction": None, "output": None, "messages": None, "text": "fox"}, {"text": "fox"}),
        # The whole, with what a template writes, beside its parts.
        ({"messages": TURNS, "text": "<|user|>quick?"}, {"messages": TURNS}),
        (
            {"text": "quick? fox", "prompt": "quick?", "chosen": "fox", "rejected": "dog"},
            {"prompt": "quick?", "chosen": "fox", "rejected": "dog"},
        ),
    ],
)
def test_fields_beside_those_of_a_shape(tokenizer: Tokenizer, record: dict[str, Any], same: dict[str, Any]) -> None:
    assert kind_of(record) == kind_of(same)
    assert read(tokenizer, record) == read(tokenizer, same)


def test_variables_of_the_template_stand_beside_a_conversation(folder: Path) -> None:
    """As TRL takes them: Qwen3's template opens a turn otherwise where thinking is off."""
    turn = "{% if m.role == 'assistant' and quiet %}(){% endif %}{{ m.content }}"
    with Tokenizer.load(folder, template(turn, prompt="<|assistant|>{% if quiet %}(){% endif %}")) as tokenizer:
        ((text, wanted),) = read(tokenizer, {"messages": TURNS[1:3], "chat_template_kwargs": {"quiet": True}})
        assert "()brown" in text
        assert wanted == "brown fox<|end|>"
        plain = read(tokenizer, {"messages": TURNS[1:3]})
        assert "()" not in plain[0][0]
        for nothing in (None, {}):
            assert read(tokenizer, {"messages": TURNS[1:3], "chat_template_kwargs": nothing}) == plain
        with pytest.raises(ValueError, match="variables of the chat template must be an object"):
            read(tokenizer, {"messages": TURNS[1:3], "chat_template_kwargs": "quiet"})


@pytest.mark.parametrize(
    "record",
    [
        {"text": ""},
        {"prompt": "a", "completion": ""},
        {"messages": [ASKS, {"role": "assistant", "content": None}]},
        {"conversations": [SHARED[1], {"from": "gpt", "value": ""}]},
        {"instruction": "a", "input": "", "output": ""},
    ],
)
def test_an_empty_record_is_left_out_and_teaches_no_immediate_end(
    folder: Path, tokenizer: Tokenizer, tmp_path: Path, record: dict[str, Any]
) -> None:
    """Published data has some: Alpaca 28 rows without an output, WikiText a line in three."""
    assert read(tokenizer, record) == []
    full = {"text": "a"} if "text" in record else {"messages": TURNS}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(full) + "\n")
    (shard,) = tokenize([tmp_path / "a.jsonl"], folder, tmp_path / "out").shards
    assert (shard.documents, shard.left_out) == (1, 1)


def test_parquet_has_no_more_fields_in_an_object_than_were_given(folder: Path, tmp_path: Path) -> None:
    """There each object has the keys of all others of its column, null where it has none."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    turn = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"

    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"properties": {name: {"type": "null"}}}}}

    def row(name: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": {name: 1}}}
        return {"messages": [ASKS, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool(name)]}

    (folder_of_template := tmp_path / "tokenizer").mkdir()
    for file in folder.iterdir():
        (folder_of_template / file.name).write_bytes(file.read_bytes())
    (folder_of_template / "chat_template.jinja").write_text(
        template(turn, before="{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}")
    )
    rows = [row("fox"), row("dog"), {"messages": TURNS, "tools": None}]
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", rows)
    made = [tmp_path / "parquet", tmp_path / "lines"]
    tokenize([tmp_path / "a.parquet"], folder_of_template, made[0])
    tokenize([tmp_path / "a.jsonl"], folder_of_template, made[1])
    one, other = map(TokenDataset, made)
    for number in range(len(rows)):
        assert sample(one, number)[0].tokens.tolist() == sample(other, number)[0].tokens.tolist()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": [{"from": "bing", "value": "a"}]}, r"conversations\[0\]: from = 'bing' is unknown"),
        ({"conversations": "a"}, "'conversations' must be a list of messages, got 'a'"),
        ({"messages": [ASKS, "a"]}, r"messages\[1\] must have 'role' and 'content', or 'from' and 'value', got 'a'"),
        ({"system": "a", "prompt": "a", "completion": "b"}, "'system' is for a chat template, and texts are learned"),
        ({"tools": "[]", "prompt": "a", "completion": "b"}, "'tools' is for a chat template, and texts are learned"),
        ({"messages": TURNS, "functions": [{"name": "f"}]}, "'functions' is not supported: that is the older form"),
        ({"messages": TURNS, "rejected_response": "no"}, "'rejected_response' is not supported: give preferences as"),
        ({"prompt": "a", "completion": [ANSWERS]}, "'prompt' must be a list of messages, got 'a'"),
        ({"prompt": "a", "completion": "b", "label": False}, "a chat with a 'label' is no example to follow"),
        ({"chosen": "a", "rejected": "b"}, "the record needs a 'prompt', or conversations that begin alike"),
        (
            {"chosen": TURNS, "rejected": [{"role": "user", "content": "something else"}, *TURNS[1:]]},
            r"'chosen' and 'rejected' must be alike up to a reply, and differ at messages\[0\]",
        ),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, r"conversations\[0\]: from = \['human'\] is unknown"),
        ({"messages": TURNS, "tools": "[" * 5000}, "'tools' is not JSON: nested too deep"),
        ({"chosen": [ASKS], "rejected": [ASKS]}, "no assistant turn"),
        ({"messages": TURNS, "tools": "["}, "'tools' is not JSON"),
        ({"messages": TURNS, "tools": {"name": "a"}}, "'tools' must be a list of functions"),
        (ALPACA | {"output": None}, "the record has the fields instruction, input; accepted are: instruction, output"),
        (ALPACA | {"output": 5}, "'output' must be a text, got 5"),
        (ALPACA | {"instruction": 0, "input": "a"}, "'instruction' must be a text, got 0"),
        (ALPACA | {"instruction": ""}, "'instruction' and 'input' are empty"),
        (ALPACA | {"input": 4}, "'input' must be a text, got 4"),
        (ALPACA | {"history": [["one"]]}, r"history\[0\] must be a prompt and its response, two texts, got \['one'\]"),
        (ALPACA | {"history": "one"}, "'history' must be a list of prompts with their responses, got 'one'"),
        (ALPACA | {"kto_tag": False}, "'kto_tag'"),
        ({"question": "a"}, "the record has the fields question; accepted are: instruction, output; messages; chosen"),
    ],
)
def test_records_that_cannot_be_used(tokenizer: Tokenizer, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents(tokenizer, record)


def test_a_file_may_mix_shapes_of_one_kind_and_no_kinds(folder: Path, tmp_path: Path) -> None:
    records = [{"messages": TURNS}, {"conversations": SHARED}, {"prompt": "a", "completion": "b"}, {"text": "a"}]
    file = tmp_path / "a.jsonl"
    write_lines(file, records[:3])
    assert tokenize([file], folder, tmp_path / "good").kind == "chat"
    assert TokenDataset(tmp_path / "good").samples == 3
    write_lines(file, records)
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl, line 4: the record has the fields text; accepted are: instruction, output; mess",
    ):
        tokenize([file], folder, tmp_path / "mixed")
