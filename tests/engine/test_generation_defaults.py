"""What a checkpoint's own files say of its outputs: honoured for every caller, compared with transformers.
The built-in model does on held-out problems what its card says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaForCausalLM

from strata import LLM, SamplingParams
from strata.engine.process.messages import Add, Hello, Step
from strata.engine.process.service import Service
from strata.models.folder import BUILTIN_FOLDER
from strata.train.data.encode import Encoder
from strata.train.score import makes, score
from strata.train.tasks.mixture import TASKS, TOOL_TASKS, held_out_examples

PROMPT = [11, 5, 7, 300]
GREEDY = SamplingParams(temperature=0, max_tokens=12)

Made = Callable[[dict[str, Any]], LLM]


@pytest.fixture
def with_defaults(folder: Path, tmp_path: Path) -> Made:
    """The model with a generation_config.json."""

    def make(values: dict[str, Any]) -> LLM:
        made = shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
        (made / "generation_config.json").write_text(json.dumps(values))
        return LLM(made, device="cpu", dtype="float32", num_pages=20, verbose=False)

    return make


def generated(llm: LLM, params: SamplingParams | None = GREEDY) -> list[int]:
    return llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].outputs[0].token_ids


def by_transformers(reference: LlamaForCausalLM, **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    out = reference.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    return out[0, len(PROMPT) :].tolist()


def test_forbidden_ids_never_come_as_in_transformers(
    with_defaults: Made, engine: Callable[..., LLM], reference: LlamaForCausalLM
) -> None:
    free = generated(engine(dtype="float32"))
    forbidden: dict[str, Any] = {"suppress_tokens": free[:2], "bad_words_ids": [[free[3]], free[4:6]]}
    llm = with_defaults({"eos_token_id": 0, **forbidden})
    ids = generated(llm)
    assert ids == by_transformers(reference, eos_token_id=0, **forbidden)
    assert ids != free
    more = SamplingParams(temperature=0, max_tokens=12, bad_words=[llm.get_tokenizer().decode([ids[2]])])
    assert not {ids[2], *free[:2]} & set(generated(llm, more)), "a request's own bad words come on top"


def test_what_no_output_can_hold_and_ends_are_no_bad_words(with_defaults: Made, engine: Callable[..., LLM]) -> None:
    llm = with_defaults({"eos_token_id": 0, "bad_words_ids": [[0], [307], [5, 9999]], "suppress_tokens": [-1, 400]})
    assert llm.engine.bad_words == ()
    assert generated(llm) == generated(engine(dtype="float32"))


def test_outputs_are_as_long_as_asked_and_end_at_stop_strings(with_defaults: Made, engine: Callable[..., LLM]) -> None:
    free = generated(engine(dtype="float32"), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    ends = [free[2]]
    short = with_defaults({"do_sample": False, "eos_token_id": ends})
    assert generated(short, None) == free[:3]
    least = with_defaults({"do_sample": False, "eos_token_id": ends, "min_new_tokens": 20})
    assert len(generated(least, None)) == 20
    assert ends[0] not in generated(least, None)[:19]
    assert least.get_default_sampling_params().over(max_tokens=5).min_tokens == 5
    stopping = with_defaults({"do_sample": False, "max_new_tokens": 40, "stop_strings": ["e"]})
    output = stopping.generate({"prompt_token_ids": PROMPT}, use_tqdm=False)[0].outputs[0]
    assert stopping.get_default_sampling_params().stop_strings == ("e",)
    assert "e" not in output.text


def test_requests_of_a_server_are_kept_to_them_as_well(with_defaults: Made, engine: Callable[..., LLM]) -> None:
    free = generated(engine(dtype="float32"))
    llm = with_defaults({"suppress_tokens": free[:1]})
    told: list[Step] = []

    def send(_: bytes, frame: bytes) -> bool:
        message = msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(frame)))
        told.extend([message] if message["type"] == "step" else [])
        return True

    service = Service(llm.engine, "tiny", send, print)
    for message in (Hello(), Add("a", PROMPT, GREEDY)):
        service.receive(b"a", msgspec.msgpack.encode(message))
    while service.patience < 0.1:
        service.step()
    ids = [token for step in told for delta in step["deltas"] for token in delta[2]]  # type: ignore[index]
    assert ids == generated(llm)
    assert free[0] not in ids


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3"),
        ({"temperature": 7.0}, "temperature must be a number from 0 to 2"),
        ({"min_new_tokens": 9, "max_new_tokens": 4}, r"min_tokens \(9\) must be at most max_tokens \(4\)"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_the_start(
    with_defaults: Made, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=rf"generation_config\.json: {words}"):
        with_defaults(values)


def test_what_is_not_used_is_told_at_the_start(folder: Path, tmp_path: Path, capsys: Any) -> None:
    made = shutil.copytree(folder, tmp_path / "model")
    (made / "generation_config.json").write_text(json.dumps({"max_length": 20, "chat_format": "x"}))
    LLM(made, device="cpu", num_pages=20)
    told = " ".join(capsys.readouterr().err.split())
    assert "max_length is not used" in told
    assert "chat_format is unknown and not used" in told


def test_stop_strings_without_a_tokenizer_are_refused(folder: Path) -> None:
    llm = LLM(folder, device="cpu", num_pages=20, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="no tokenizer"):
        generated(llm, SamplingParams(stop="x"))


REQUIRED = ("two-digit addition", "two-digit subtraction", "sorting five numbers", "word reversal", "unit conversion")
REQUIRED += ("tables", "story places")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", device="cpu")  # as LLM() is


def test_held_out_accuracy_of_the_required_tasks(llm: LLM) -> None:
    tasks = [task for task in TASKS if task.name in REQUIRED]
    assert len(tasks) == len(REQUIRED)
    examples = [example for task in tasks for example in held_out_examples(task, 40)]
    assert all(example.held_out for example in examples)
    prompts = [llm.chat_prompt([{"role": "user", "content": example.question}]) for example in examples]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=300), use_tqdm=False)
    for one in score(examples, [output.outputs[0].text for output in outputs]):
        assert one.accuracy >= 0.95, one


def test_held_out_calls_and_answers_from_their_results(llm: LLM) -> None:
    """Asked as documents are written in training, tools and all; the answer to a result counts only after its call."""
    encoder = Encoder.load(BUILTIN_FOLDER)

    def replies(prompts: list[list[int]]) -> list[str]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    examples = [example for task in TOOL_TASKS for example in held_out_examples(task, 25)]
    first = replies([encoder.prompt(example) for example in examples])
    for example, reply in zip(examples, first, strict=True):
        assert example.call is not None or "<tool_call>" not in reply, (example, reply)
    right = [i for i, one in enumerate(examples) if one.call is None or makes(first[i], one.call)]
    assert len(right) >= 0.95 * len(examples)
    answered = [examples[i] for i in right if examples[i].call is not None]
    for one in score(answered, replies([encoder.prompt_after_call(example) for example in answered])):
        assert one.accuracy >= 0.95, one


def test_the_weights_fit_the_package() -> None:
    assert sum(file.stat().st_size for file in BUILTIN_FOLDER.glob("*.safetensors")) <= 16 * 2**20


def test_the_default_parameters_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params().temperature == 0
