"""The exercises as tokenized data: every document once, the right tokens counted; and how replies are scored."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from typer.testing import CliRunner

from strata.cli.main import app
from strata.models.config import config_from_dict
from strata.serve.replies.reply_parser import ReplyParser, collect
from strata.text.tokenizer import Tokenizer
from strata.train.data.encode import Encoder
from strata.train.data.loader import DataPosition, Loader, check_data
from strata.train.data.mixture import Mixture
from strata.train.data.shards import ShardIndex, TokenDataset
from strata.train.data.tokenize import tokenizer_digest
from strata.train.score import Score, extract_answer, makes, questions, score
from strata.train.tasks.example import BOUNDARY, Example
from strata.train.tasks.exercises import write_exercises
from strata.train.tasks.mixture import document
from strata.train.tasks.spelling import TASKS as SPELLING_TASKS
from strata.train.tasks.tool import ExerciseCall
from strata.train.tasks.vocabulary import SPECIAL_TOKENS, make_tokenizer
from tests.train.conftest import SMALL
from tests.train.samples import sample


def write(out: Path, documents: int = 50, **options: object) -> ShardIndex:
    values = {"seed": 3, "vocab_size": 600, "tokenizer_documents": 200, "documents_per_shard": 16, **options}
    return write_exercises(out, documents, **values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 documents of seed 3 in shards of 16, by one process, with their own tokenizer."""
    out = tmp_path_factory.mktemp("exercises") / "data"
    write(out)
    return out


def test_sample_i_is_document_i_as_the_chat_template_writes_it(written: Path) -> None:
    dataset = TokenDataset(written)
    assert (dataset.samples, len(dataset.index.shards), dataset.index.kind) == (50, 4, "chat")
    with Tokenizer.load(written / "tokenizer") as tokenizer:
        for number in range(50):
            (read,) = sample(dataset, number)
            one = document(3, number)
            text = tokenizer.decode(read.tokens.tolist(), skip_special_tokens=False)
            learned = tokenizer.decode(read.tokens[read.loss_mask].tolist(), skip_special_tokens=False)
            messages = [message for example in one.examples for message in example.messages]
            said = [text.replace(BOUNDARY, "") for example in one.examples for text in example.written]
            replies = "".join(text + "<|end|>" for text in said)
            if one.plain:
                assert text == f"<|begin|>{messages[0]['content']}\n{messages[1]['content']}<|end|>"
                assert learned == "\n" + replies
            else:
                system = [] if one.system is None else [{"role": "system", "content": one.system}]
                tools = [tool.schema for tool in one.tools] or None
                assert text == tokenizer.chat_text([*system, *messages], add_generation_prompt=False, tools=tools).text
                assert learned == replies
            assert not read.loss_mask[0]


def test_the_tokenizer_is_that_of_the_first_documents(written: Path) -> None:
    made = make_tokenizer((document(3, i) for i in range(200)), 600)
    assert (written / "tokenizer/tokenizer.json").read_text() == made.to_str()
    with Tokenizer.load(written / "tokenizer") as tokenizer:
        assert TokenDataset(written).index.tokenizer == tokenizer_digest(tokenizer)
        assert [tokenizer.id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    config = json.loads((written / "tokenizer/tokenizer_config.json").read_text())
    assert config["model_max_length"] == 1024


def test_processes_and_a_stopped_run_change_nothing(written: Path, tmp_path: Path) -> None:
    whole = ShardIndex.read(written)
    seen: list[tuple[int, int]] = []
    together = write(tmp_path / "two", workers=2, report=lambda *at: seen.append(at))
    assert together == whole
    assert seen == [(0, 4), *((done, 4) for done in range(5))]  # the first while the tokenizer is made
    out = tmp_path / "two"
    (out / "index.json").unlink()
    (out / "shard-00002.json").unlink()
    times = {path.name: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    assert write(out) == whole
    changed = {
        path.name for path in out.rglob("*") if path.is_file() and times.get(path.name) != path.stat().st_mtime_ns
    }
    parts = {f"shard-00002.{part}.npy" for part in ("tokens", "wanted", "offsets")}
    assert changed == parts | {"shard-00002.json", "index.json"}
    with pytest.raises(ValueError, match="made with other seed; choose another folder"):
        write(out, seed=4)


def test_more_documents_begin_with_the_same(written: Path, tmp_path: Path) -> None:
    """With a tokenizer that is given, documents depend on seed and index alone, however they are divided."""
    write(tmp_path / "more", 60, tokenizer_folder=written / "tokenizer", documents_per_shard=64)
    fewer, more = TokenDataset(written), TokenDataset(tmp_path / "more")
    assert not (tmp_path / "more/tokenizer").exists()
    assert more.index.tokenizer == fewer.index.tokenizer
    for number in range(50):
        (one,), (other,) = sample(fewer, number), sample(more, number)
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.loss_mask, other.loss_mask)


def test_a_step_has_what_the_encoder_wrote(written: Path) -> None:
    dataset = TokenDataset(written)
    encoder = Encoder.load(written / "tokenizer")
    step = Loader(Mixture([dataset], [1.0], 0), 1024, 4, 50).step(DataPosition())
    assert sum(len(batch.lengths) for batch in step.batches) > 20
    for batch in step.batches:
        assert batch.samples is not None
        made = encoder.encode([document(3, number) for number in batch.samples.numbers.tolist()])
        assert batch.tokens.tolist() == made.tokens.tolist()
        assert batch.offsets.tolist() == made.offsets.tolist()
        assert (batch.rows + 1).tolist() == np.flatnonzero(made.loss_mask).tolist()
        assert batch.targets.tolist() == made.tokens[made.loss_mask].tolist()


def test_the_data_fits_a_model_of_its_tokenizer(written: Path) -> None:
    with Tokenizer.load(written / "tokenizer") as tokenizer:
        config = config_from_dict(SMALL["model"] | {"vocab_size": tokenizer.vocab_size}, "model")
        check_data([TokenDataset(written)], "chat", config, tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": 0}, "documents = 0 must be positive"),
        ({"vocab_size": 100}, r"vocab_size = 100 must lie in 512\.\.65536"),
    ],
)
def test_bad_numbers_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_chat_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tokenizer has no token <\|begin\|>"):
        write(tmp_path / "out", tokenizer_folder=folder)


def test_the_command(written: Path, tmp_path: Path) -> None:
    arguments = ["data", "exercises", "--out", str(tmp_path / "d"), "--documents", "40", "--workers", "1"]
    done = CliRunner().invoke(app, [*arguments, "--seed", "3", "--tokenizer", str(written / "tokenizer")])
    assert done.exit_code == 0, done.output
    assert "chat, 40 documents" in " ".join(done.output.split())  # lines break where the console ends
    assert np.array_equal(
        sample(TokenDataset(tmp_path / "d"), 39)[0].tokens, sample(TokenDataset(written), 39)[0].tokens
    )
    # What is no sub-command are files, wherever the options stand.
    (tmp_path / "a.txt").write_text("Some text.")
    for place, name in enumerate((["data", "--out"], ["data", "files", "--out"])):
        done = CliRunner().invoke(app, [*name, str(tmp_path / f"t{place}"), str(tmp_path / "a.txt"), "--workers", "1"])
        assert done.exit_code == 0, done.output
        assert TokenDataset(tmp_path / f"t{place}").index.kind == "text"


def test_a_prompt_is_what_stands_before_a_reply(made_tokenizer: tokenizers.Tokenizer, tokenizer_folder: Path) -> None:
    encoder, documents = Encoder(made_tokenizer), [document(0, i) for i in range(60)]
    made = encoder.encode(documents)
    with Tokenizer.load(tokenizer_folder) as served:
        for one, start, end in zip(documents, made.offsets[:-1], made.offsets[1:], strict=True):
            if one.plain:
                continue
            first, tools = one.examples[0], [tool.schema for tool in one.tools] or None
            prompts = [(first.messages[:1], encoder.prompt(first))]
            if first.call is not None:
                prompts.append((first.messages[:-1], encoder.prompt_after_call(first)))
            for chat, prompt in prompts:
                assert served.encode_chat(chat, tools=tools) == prompt
                assert one.system is not None or made.tokens[start:end][: len(prompt)].tolist() == prompt
    assert sum(bool(one.tools) for one in documents) > 5
    assert sum(example.call is not None for one in documents for example in one.examples) > 5


def test_digits_and_reversed_letters_are_single_tokens(made_tokenizer: tokenizers.Tokenizer) -> None:
    vocabulary = made_tokenizer.get_vocab()
    assert [vocabulary[token] for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert not [token for token in vocabulary if sum(character.isdigit() for character in token) and len(token) > 1]
    reversal = next(task for task in SPELLING_TASKS if task.name == "word reversal")
    example = reversal.sample(random.Random(0))
    parts = example.reply.rsplit("Answer: ", 1)[1].split("\u2060")
    assert all(len(part) == 1 for part in parts)
    assert "".join(parts) == example.answer


def test_tokenizer_folder_loads_in_transformers(tokenizer_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    messages = [{"role": "user", "content": "What is 47 + 38?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with Tokenizer.load(tokenizer_folder) as ours:
        assert text == ours.chat_text(messages).text
        assert theirs("Sort 3, 12")["input_ids"] == ours.encode("Sort 3, 12")
        assert theirs.eos_token_id == ours.eos_ids[0]
        with pytest.raises(ValueError, match="roles are"):
            ours.chat_text([{"role": "function", "content": "x"}])


FUNCTIONS = [
    {"name": "now"},
    {"name": "f", "description": "Does it.", "parameters": {"type": "object", "properties": {}}},
    {
        "name": "g",
        "parameters": {
            "properties": {
                "a": {"type": "integer"},
                "b": {"enum": ["x", 2]},
                "c": {"type": ["string", "null"]},
                "d": {"anyOf": [{"type": "array"}]},
                "items": True,
                "e": {"type": 5},
            },
            "required": ["a", "items"],
        },
    },
]


def test_the_template_shows_every_kind_of_tool_in_a_line(tokenizer_folder: Path) -> None:
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    with Tokenizer.load(tokenizer_folder) as served:
        text = served.chat_text([{"role": "user", "content": "Go."}], tools=tools).text
    lines = "Tools:\nnow()\nf(): Does it.\ng(a: integer, b?: x|2, c?: string|null, d?: any, items: any, e?: any)"
    assert text == f"<|begin|><|system|>{lines}<|end|><|user|>Go.<|end|><|assistant|>"


def test_the_template_shows_calls_as_the_parser_reads_them(tokenizer_folder: Path) -> None:
    """Whatever a client sends back: arguments as an object or as the text that they were, beside content or without."""
    functions = [{"name": "f", "arguments": {"a": "ü", "b": 1}}, {"name": "g", "arguments": "{}"}]
    calls = [{"id": str(i), "type": "function", "function": one} for i, one in enumerate(functions)]
    with Tokenizer.load(tokenizer_folder) as served:
        for content in ("", "So.", None):
            said = {"role": "assistant", "content": content, "tool_calls": calls}
            text = served.chat_text([{"role": "user", "content": "Go."}, said, {"role": "tool", "content": "7"}]).text
            _, _, rest = text.partition("<|assistant|>")
            written, _, rest = rest.partition("<|end|>")
            assert rest == "<|tool|>7<|end|><|assistant|>"
            parser = ReplyParser("hermes", reasoning=False)
            reply = collect(parser.append(written) + parser.finish())
            assert reply.content == (content or "")
            assert [(call.name, call.arguments) for call in reply.tool_calls] == [
                ("f", '{"a": "ü", "b": 1}'),
                ("g", "{}"),
            ]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("ones: 7 + 8 = 15\nAnswer: 85", "85"),
        ("Answer: 3000 m\n", "3000 m"),
        ("Answer: 1\nAnswer:  2 \nmore", "2"),
        ("85", None),
        ("", None),
    ],
)
def test_extract_answer(reply: str, answer: str | None) -> None:
    assert extract_answer(reply) == answer


def test_score_counts_by_task() -> None:
    def asked(task: str, answer: str) -> Example:
        return Example(task, "?", f"Answer: {answer}", answer, "p", True)

    examples = [asked("a", "1"), asked("b", "2"), asked("a", "3")]
    assert score(examples, ["Answer: 1", "Answer: 22", "3"]) == [Score("a", 1, 2), Score("b", 0, 1)]


def test_only_held_out_questions_are_asked() -> None:
    asked = questions(5)
    assert all(example.held_out and example.answer for example in asked)
    assert {"calling a calculator", "calling a look-up", "tools of no use"} <= {example.task for example in asked}
    named = {"two-digit addition", "two-digit subtraction", "sorting five numbers", "word reversal", "unit conversion"}
    assert named <= {example.task for example in asked}


@pytest.mark.parametrize(
    ("inside", "right"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}}', True),
        ('{"arguments": {"b": "x", "a": 1}, "name": "add"}', True),
        ('{"name": "sum", "arguments": {"a": 1, "b": "x"}}', False),
        ('{"name": "add", "arguments": {"a": 2, "b": "x"}}', False),
        ('{"name": "add", "arguments": {"a": 1}}', False),
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}', False),
    ],
)
def test_a_call_counts_by_what_it_says(inside: str, right: bool) -> None:
    call = ExerciseCall("add", (("a", 1), ("b", "x")), "3")
    assert makes(f"<tool_call>\n{inside}\n</tool_call>", call) == right
    assert not makes(f"Well: <tool_call>\n{inside}\n</tool_call>", call)
    assert not makes(inside, call)
