"""The built-in model does on held-out problems what its card says, through the same engine that serves it."""

from __future__ import annotations

import pytest

from strata import LLM, SamplingParams
from strata.models.folder import BUILTIN_FOLDER
from strata.train.score import score
from strata.train.tasks.mixture import TASKS, held_out_examples

REQUIRED = ("two-digit addition", "two-digit subtraction", "sorting five numbers", "word reversal", "unit conversion")


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


def test_the_weights_fit_the_package() -> None:
    assert sum(file.stat().st_size for file in BUILTIN_FOLDER.glob("*.safetensors")) <= 16 * 2**20


def test_the_default_parameters_are_the_models(llm: LLM) -> None:
    assert llm.get_default_sampling_params().temperature == 0
