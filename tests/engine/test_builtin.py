"""The built-in model does on held-out problems what its card says, through the same engine that serves it."""

from __future__ import annotations

import pytest

from strata import LLM, SamplingParams
from strata.models.folder import BUILTIN_FOLDER
from strata.train.data.encode import Encoder
from strata.train.score import makes, score
from strata.train.tasks.mixture import TASKS, TOOL_TASKS, held_out_examples

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
