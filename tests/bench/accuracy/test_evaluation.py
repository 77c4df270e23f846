"""`strata eval`: a roughly rounded model against transformers, how text is read, what it refuses; widths of shares."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from strata.bench.accuracy.divergence import divergence, losses
from strata.bench.accuracy.evaluation import EXAMPLES
from strata.bench.accuracy.intervals import Bootstrap, mean_difference, mean_of_tasks, wilson
from strata.bench.accuracy.passages import Passage, exercise_passages, read_passages
from strata.bench.accuracy.states import predict
from strata.cli.main import app
from strata.engine.llm import LLM
from strata.models.folder import BUILTIN_FOLDER
from strata.text.tokenizer import Tokenizer
from strata.train.score import extract_answer, questions

TEXT = "What is 47 + 38? Spell the word planet. Which day comes after Monday? Sort 5, 3, 9, 1. " * 4


@pytest.fixture(scope="module")
def rough(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with its matrices rounded to 15 values a row."""
    folder = tmp_path_factory.mktemp("rough") / "model"
    shutil.copytree(BUILTIN_FOLDER, folder)
    for file in folder.glob("*.safetensors"):
        rounded = {name: _rounded(weight) for name, weight in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    return folder


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() < 2:
        return weight
    scale = weight.float().abs().amax(1, keepdim=True) / 7
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


@pytest.fixture(scope="module")
def passages() -> list[Passage]:
    ids = Tokenizer.load(BUILTIN_FOLDER).encode(TEXT)
    assert len(ids) > 70
    return [Passage(tuple(ids[:70]), 1, 0), Passage(tuple(ids[10:31]), 9, 1), Passage(tuple(ids[5:7]), 1, 2)]


def test_figures_are_those_of_transformers(rough: Path, passages: list[Passage]) -> None:
    """In float32; prompts run in chunks of 16 tokens here, and whole there."""
    found, expected = [], []
    for folder in (rough, BUILTIN_FOLDER):
        llm = LLM(folder, dtype="float32", device="cpu", max_num_batched_tokens=16, num_pages=64, verbose=False)
        found.append(predict(llm, passages))
        with torch.no_grad():
            twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            logits = [twin(torch.tensor([one.ids])).logits[0, one.first - 1 : -1] for one in passages]
        expected.append(torch.cat(logits).double().log_softmax(-1))
    ours, theirs = expected
    targets = torch.tensor([id for one in passages for id in one.ids[one.first :]])
    each = torch.arange(len(targets))
    compared = divergence(*found, passages)
    np.testing.assert_allclose(compared.losses, -ours[each, targets], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(compared.reference_losses, -theirs[each, targets], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(compared.kl, (theirs.exp() * (theirs - ours)).sum(-1), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(compared.agrees, ours.argmax(-1) == theirs.argmax(-1))
    assert 0 < compared.agrees.mean() < 1
    assert not divergence(found[0], found[0], passages).kl.any()
    np.testing.assert_array_equal(losses(found[1], passages), compared.reference_losses)


def run(*arguments: object) -> Any:
    given = ["eval", *map(str, arguments), "--json", "--dtype", "float32"]
    done = CliRunner().invoke(app, given, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_model_against_another_on_exercises(rough: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [one for one in questions(1) if one.task in ("comparison", "sorting", "calling a calculator")]
    asked: list[int] = []
    monkeypatch.setattr("strata.bench.accuracy.evaluation.questions", lambda count: asked.append(count) or few)
    shown = run(rough, "--against", "builtin", "--passages", 3, "--passage-tokens", 60)  # tasks without being asked to
    assert asked == [EXAMPLES]
    assert (shown["documents"], shown["passages"]) == (3, 3)
    for name in ("kl_mean", "kl_p99", "top1_agreement", "perplexity", "perplexity_ratio", "task_difference"):
        assert shown[name]["low"] <= shown[name]["value"] <= shown[name]["high"]
    assert 0 < shown["kl_mean"]["value"] < shown["kl_p99"]["value"]
    ratio = shown["perplexity"]["value"] / shown["reference_perplexity"]["value"]
    assert shown["perplexity_ratio"]["value"] == pytest.approx(ratio)
    right = [one["correct"] / one["total"] for one in shown["scores"]]
    assert [one["task"] for one in shown["scores"]] == ["comparison", "sorting", "calling a calculator"]
    assert shown["task_mean"]["value"] == pytest.approx(sum(right) / 3)
    assert [one["correct"] for one in shown["reference_scores"]] == [1, 1, 1]


def test_a_model_alone_on_plain_text(tmp_path: Path) -> None:
    """One document, of which the passages stand for documents; the table says what was left out."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ["--text", str(text), "--passage-tokens", "32", "--passages", "2"]
    printed = CliRunner().invoke(app, ["eval", "builtin", *options], catch_exceptions=False).stdout
    assert re.search(r"text\.txt: 2 passages of \d, 62 tokens scored", printed)
    assert "a bootstrap over 2 documents" in printed
    assert "KL" not in printed


def test_of_exercises_the_right_replies_are_scored_and_nothing_else() -> None:
    tokenizer = Tokenizer.load(BUILTIN_FOLDER)
    found = exercise_passages(tokenizer, 30, 200)
    assert len(found) == 30
    examples = {example.question: example for example in questions(2)}
    for one in found:
        before, scored = (tokenizer.decode(list(ids)) for ids in (one.ids[: one.first], one.ids[one.first :]))
        example = next(example for question, example in examples.items() if question in before)
        assert extract_answer(scored) == example.answer
        assert not any(example.question in scored for example in examples.values())
    short = exercise_passages(tokenizer, 30, 40)
    assert {len(one.ids) for one in short} == {*(len(one.ids) for one in found if len(one.ids) < 40), 40}
    with pytest.raises(ValueError, match="passages of 3 tokens leave no room for a reply; give more"):
        exercise_passages(tokenizer, 30, 3)


def test_a_model_without_the_chat_format_of_the_tasks_has_passages_alone(tmp_path: Path) -> None:
    bare = shutil.copytree(BUILTIN_FOLDER, tmp_path / "bare")
    tokens = (bare / "tokenizer.json").read_text()
    (bare / "tokenizer.json").write_text(tokens.replace("<|tool|>", "<|tulo|>"))
    shown = run(bare, "--passages", 2)
    assert (shown["passages"], shown["scores"]) == (2, [])
    with pytest.raises(ValueError, match="the tasks are asked in the chat format of the built-in model"):
        run(bare, "--passages", 2, "--task-examples", 1)


class Words:
    """A tokenizer of words that begins texts with 1."""

    bos_id = 1

    def encode(self, text: str) -> list[int]:
        return [1, *map(int, text.split())]

    def encode_chat(
        self, messages: list[Mapping[str, str]], add_generation_prompt: bool, tools: list[int] | None, variables: Any
    ) -> list[int]:
        assert (add_generation_prompt, variables) == (False, None)
        return [9, *(tools or ()), *(int(one["content"]) for one in messages)]


def test_documents_are_cut_and_each_part_begins_as_a_text_does(tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    chat = {"messages": [{"role": "user", "content": "5"}, {"role": "assistant", "content": "6"}]}
    shown = chat | {"tools": "[3]", "text": "7"}  # as training has it, which sees the tools too
    file.write_text("\n".join([json.dumps({"text": "10 11 12 13 14 15 16"}), "", *map(json.dumps, (chat, shown))]))
    found = read_passages(file, Words(), 4)  # type: ignore[arg-type]
    expected = [((1, 10, 11, 12), 0), ((1, 13, 14, 15), 0), ((1, 16), 0), ((9, 5, 6), 1), ((9, 3, 5, 6), 2)]
    assert [(one.ids, one.document) for one in found] == expected
    assert [one.scored for one in found] == [3, 3, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.txt", " \n", "has no document of two tokens or more"),
        ("text.jsonl", "{}", r'line 1: must be \{"text": "..."\} or \{"messages": \[...\]\}, got \{\}'),
        ("text.jsonl", '{"text": "5"}\n{"text"', "line 2, column 8: not JSON"),
        ("text.jsonl", '{"text": "5"}\n{"messages": [], "tools": "["}', "line 2: 'tools' is not JSON"),
        ("none.txt", None, "does not exist; give a file of JSON lines"),
    ],
)
def test_text_that_is_none(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_passages(tmp_path / name, Words(), 8)  # type: ignore[arg-type]


def test_other_vocabularies_and_passages_that_do_not_fit_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    other, bare = tmp_path / "other", tmp_path / "bare"
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    for folder in (other, bare):
        folder.mkdir()
        for name in names:
            shutil.copy(BUILTIN_FOLDER / name, folder)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    with pytest.raises(ValueError, match="only models that predict the same ids can be compared"):
        run("builtin", "--against", other)
    tokens = json.loads((bare / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = (next(name for name, id in vocabulary.items() if id == number) for number in (300, 301))
    vocabulary[first], vocabulary[second] = 301, 300
    (bare / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(ValueError, match=r"token 300 is .*: only models with the same vocabulary can be compared"):
        run("builtin", "--against", bare)


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_in_newcombes_table(right: int, asked: int, low: float, high: float) -> None:
    """R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    found = wilson(right / asked, asked)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_tasks_count_alike_and_their_mean_has_a_width_where_all_are_right() -> None:
    small, large = np.array([1.0, 0.0]), np.ones(8)
    assert mean_of_tasks([small, large]).value == 0.75
    alike = mean_of_tasks([np.ones(50), np.ones(50)])
    assert (alike.value, alike.low) == (1.0, wilson(1.0, 100).low)


def test_a_difference_of_pairs_by_hand() -> None:
    """Of 100 questions 8 are right for the model alone, 2 for the reference: (8 + 1) / 102 and (2 + 1) / 102."""
    right, reference = np.zeros(100), np.zeros(100)
    right[:8], reference[8:10], right[50:], reference[50:] = 1, 1, 1, 1
    found = mean_difference([right], [reference])
    assert found.value == pytest.approx(0.06)
    assert (found.low, found.high) == (pytest.approx(0.0588 - 0.0656, abs=2e-4), pytest.approx(0.1244, abs=2e-4))
    same = mean_difference([right], [right])
    assert same.low is not None
    assert same.low < same.value == 0 < same.high  # type: ignore[operator]


def test_resampled_means_vary_as_documents_do() -> None:
    """400 documents of 5 tokens that are alike: as 400 figures, not 2,000."""
    of_documents = np.random.default_rng(3).normal(2.0, 1.0, 400)
    bootstrap = Bootstrap([document for document in range(400) for _ in range(5)])
    found = bootstrap.mean(np.repeat(of_documents, 5))
    assert found.value == pytest.approx(of_documents.mean())
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 * of_documents.std() / 20, rel=0.1)
    shown = bootstrap.mean(np.repeat(of_documents, 5), np.exp)
    assert (shown.value, shown.low) == (pytest.approx(np.exp(found.value)), pytest.approx(np.exp(found.low)))


def test_quantiles_and_one_document() -> None:
    values = np.random.default_rng(0).permutation(np.arange(1.0, 1001.0))
    found = Bootstrap(range(1000)).quantile(values, 0.99)
    assert found.value == 990
    assert found.low is not None
    assert found.high is not None
    # The 990th of 1000 lies between the orders 990 -+ 1.96 sqrt(1000 * 0.99 * 0.01).
    assert (found.low, found.high) == (pytest.approx(983.8, abs=2.5), pytest.approx(996.2, abs=2.5))
    assert Bootstrap([7] * 1000).quantile(values, 0.99).low is None
