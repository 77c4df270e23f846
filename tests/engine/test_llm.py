"""The engine from end to end, against transformers and against itself under pressure."""

from __future__ import annotations

import inspect
import random
from collections import UserList
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from strata import LLM, SamplingParams
from strata.engine.engine_config import EngineConfig

Engine = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts(count: int, seed: int = 0, shared: int = 20) -> list[dict[str, list[int]]]:
    """Prompts of odd lengths; half of them begin alike, so that the prefix tree is hit."""
    rng = random.Random(seed)
    prefix = [rng.randrange(307) for _ in range(shared)]
    made = []
    for index in range(count):
        own = [rng.randrange(307) for _ in range(rng.randrange(1, 60))]
        made.append({"prompt_token_ids": prefix + own if index % 2 else own})
    return made


def reference_ids(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def ids_of(
    llm: LLM, asked: list[dict[str, list[int]]], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    outputs = llm.generate(asked, params, use_tqdm=False)
    llm.engine.loop.scheduler.check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("chunk", [7, 512])
def test_greedy_equals_transformers(engine: Engine, reference: LlamaForCausalLM, chunk: int) -> None:
    asked = prompts(8)
    got = ids_of(engine(max_num_batched_tokens=chunk, dtype="float32"), asked, GREEDY)
    for prompt, ids in zip(asked, got, strict=True):
        assert ids == reference_ids(reference, prompt["prompt_token_ids"], 24)


def test_running_ahead_gives_the_same(engine: Engine, folder: Path) -> None:
    asked = prompts(12)
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=20)
    params = [GREEDY, sampled] * 6
    want = ids_of(engine(dtype="float32"), asked, params)
    llm = LLM(folder, device="cpu", dtype="float32", num_pages=200)
    llm.engine.loop._run_ahead = True
    assert ids_of(llm, asked, params) == want


def test_stop_token_ids_and_min_tokens(engine: Engine) -> None:
    llm = engine(dtype="float32")
    free = ids_of(llm, prompts(1), GREEDY)[0]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[free[4]])
    output = llm.generate(prompts(1), params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == free[: free.index(free[4]) + 1]
    assert output.stop_reason == free[4]
    longer = SamplingParams(temperature=0, max_tokens=24, min_tokens=10, ignore_eos=True, stop_token_ids=[free[4]])
    held = ids_of(llm, prompts(1), longer)[0]
    assert len(held) >= 10
    assert free[4] not in held[:10]


def test_n_samples_share_a_prompt(engine: Engine) -> None:
    llm = engine(dtype="float32")
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    output = llm.generate(prompts(1), params, use_tqdm=False)[0]
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    again = llm.generate(prompts(5), [params, *[GREEDY] * 4], use_tqdm=False)[0]
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in output.outputs]


def test_logprobs_equal_transformers(engine: Engine, reference: LlamaForCausalLM) -> None:
    llm = engine(dtype="float32", max_num_batched_tokens=9)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    output = llm.generate(prompts(3), params, use_tqdm=False)[1]
    prompt, sample = output.prompt_token_ids, output.outputs[0]
    with torch.no_grad():
        want = reference(torch.tensor([prompt + sample.token_ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for position in range(1, len(prompt)):
        entry = output.prompt_logprobs[position]
        assert entry is not None
        row = want[position - 1]
        assert entry[prompt[position]].logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
        assert set(row.topk(2).indices.tolist()) <= set(entry)
    assert sample.logprobs is not None
    for place, entry in enumerate(sample.logprobs):
        row = want[len(prompt) - 1 + place]
        assert list(entry)[:3] == row.topk(3).indices.tolist()
        assert entry[sample.token_ids[place]].logprob == pytest.approx(float(row.max()), abs=1e-4)
        assert entry[sample.token_ids[place]].rank == 1
    assert sample.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(sample.logprobs, sample.token_ids, strict=True))
    )


def test_logit_bias_and_bad_words(engine: Engine) -> None:
    llm = engine(dtype="float32")
    forced = SamplingParams(temperature=0, max_tokens=5, logit_bias={42: 100.0}, ignore_eos=True)
    assert ids_of(llm, prompts(1), forced)[0] == [42] * 5
    free = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)[0]
    word = free.outputs[0].text[4:8]
    ids = tuple(llm.get_tokenizer().encode(word, add_special_tokens=False))
    banned = llm.generate(
        "the quick", SamplingParams(temperature=0, max_tokens=30, bad_words=[word], ignore_eos=True), use_tqdm=False
    )[0]
    got = banned.outputs[0].token_ids
    assert all(tuple(got[i : i + len(ids)]) != ids for i in range(len(got)))


def test_penalties_follow_the_formula(engine: Engine, reference: LlamaForCausalLM) -> None:
    llm = engine(dtype="float32")
    params = SamplingParams(
        temperature=0,
        max_tokens=20,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        ignore_eos=True,
    )
    prompt = prompts(1)[0]["prompt_token_ids"]
    tokens = list(prompt)
    for _ in range(20):
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0, -1]
        for id in set(tokens):
            logits[id] = logits[id] / 1.3 if logits[id] > 0 else logits[id] * 1.3
        for id in set(tokens[len(prompt) :]):
            logits[id] -= 0.7 + 0.4 * tokens[len(prompt) :].count(id)
        tokens.append(int(logits.argmax()))
    assert ids_of(llm, prompts(1), params)[0] == tokens[len(prompt) :]


def test_metrics_tell_when_things_happened(engine: Engine) -> None:
    metrics = engine(dtype="float32").generate(prompts(2), GREEDY, use_tqdm=False)[1].metrics
    assert metrics is not None
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


ONE = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
ASKED = {"role": "user", "content": "fox"}
BEGUN = [ASKED, {"role": "assistant", "content": "the quick"}]
TOOL = {"type": "function", "function": {"name": "jump", "description": "", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood | default('none') }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_arguments_have_the_order_and_the_defaults_of_vllm() -> None:
    parameters = list(inspect.signature(LLM.chat).parameters.values())[1:]
    assert [(one.name, one.default) for one in parameters[1:]] == [
        ("sampling_params", None),
        ("use_tqdm", True),
        ("lora_request", None),
        ("chat_template", None),
        ("chat_template_content_format", "auto"),
        ("add_generation_prompt", True),
        ("continue_final_message", False),
        ("tools", None),
        ("chat_template_kwargs", None),
        ("mm_processor_kwargs", None),
    ]


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([ASKED], {}),
        ([ASKED], {"add_generation_prompt": False}),
        (BEGUN, {"add_generation_prompt": False, "continue_final_message": True}),
        ([ASKED], {"chat_template": TEMPLATE}),
        ([ASKED], {"chat_template": TEMPLATE, "tools": [TOOL]}),
        ([ASKED], {"chat_template": TEMPLATE, "chat_template_kwargs": {"mood": "fine", "unread": [1]}}),
        ([ASKED], {"tools": []}),
    ],
)
def test_the_prompt_is_that_of_transformers(
    engine: Engine, folder: Path, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    theirs = {"add_generation_prompt": True, **options}
    theirs.update(theirs.pop("chat_template_kwargs", {}))
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False, **theirs)
    single = engine(dtype="float32").chat(messages, ONE, use_tqdm=False, **options)
    several = engine(dtype="float32").chat([messages, messages], [ONE, ONE], use_tqdm=False, **options)
    assert [one.prompt for one in (*single, *several)] == [text] * 3
    again = engine(dtype="float32").generate(text, ONE, use_tqdm=False)[0]
    assert all(one.prompt_token_ids == again.prompt_token_ids for one in several)
    assert all(one.outputs[0].token_ids == again.outputs[0].token_ids for one in (*single, *several))


def test_what_asks_for_nothing_is_taken(engine: Engine) -> None:
    plain = engine(dtype="float32").chat([ASKED], ONE, use_tqdm=False)[0]
    nothing = {"lora_request": None, "mm_processor_kwargs": {}, "tools": None, "chat_template_kwargs": {}}
    for layout in ("auto", "string"):
        asked = engine(dtype="float32").chat(
            [ASKED], ONE, use_tqdm=False, chat_template_content_format=layout, **nothing
        )[0]
        assert asked.prompt_token_ids == plain.prompt_token_ids
    # Conversations in a sequence that is no list, as a column of a data set.
    several = engine(dtype="float32").chat(UserList([[ASKED], [ASKED]]), ONE, use_tqdm=False)
    assert [one.prompt_token_ids for one in several] == [plain.prompt_token_ids] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"continue_final_message": True}, "add_generation_prompt=False"),
        ({"chat_template_kwargs": {"tools": []}}, "'tools' is no variable"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "'continue_final_message' is no variable"),
        ({"chat_template_kwargs": ["mood"]}, "variables of the chat template must be an object"),
        ({"chat_template": "template.jinja"}, "chat_template must be the text of a Jinja template"),
        ({"chat_template": 5}, "chat_template must be the text of a Jinja template"),
        ({"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat template failed"),
        ({"chat_template": "{% for %}"}, "syntax error in line 1"),
        ({"chat_template_content_format": "openai"}, "chat_template_content_format must be"),
        ({"lora_request": object()}, "lora_request is not supported"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt must be True or False, got 'no'"),
        ({"continue_final_message": 1}, "continue_final_message must be True or False, got 1"),
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs is not supported"),
        ({"tools": [{"name": 5}]}, r"tools\[0\] must be like"),
        ({"tools": TOOL}, "tools must be a list"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(engine: Engine, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine(dtype="float32").chat([ASKED], ONE, use_tqdm=False, **options)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("fox", "messages must be a list"),
        ([], "messages must be a list"),
        (ASKED, "messages must be a list"),
        (["fox"], r"messages\[0\] must be like"),
        ([[ASKED], []], "conversation 1: messages must be a list"),
        ([[ASKED], [ASKED, {"role": "user"}]], r"conversation 1: messages\[1\]\.content is missing"),
    ],
)
def test_what_is_no_conversation_is_refused(engine: Engine, messages: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine(dtype="float32").chat(messages, ONE, use_tqdm=False)


@pytest.mark.parametrize("deterministic", [False, True])
def test_preemption_loses_nothing(folder: Path, deterministic: bool) -> None:
    asked = prompts(10, seed=5)
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=30, ignore_eos=True) for i in range(10)]
    options = {"device": "cpu", "dtype": "float32", "deterministic": deterministic}
    want = ids_of(LLM(folder, num_pages=400, **options), asked, params)
    tight = LLM(folder, num_pages=14, max_num_batched_tokens=40, **options)
    assert ids_of(tight, asked, params) == want
    assert tight.engine.loop.scheduler.statistics.preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([5] * 256, {}, "max_model_len"),
        ([307], {}, "out of range"),
        ([-1], {}, "out of range"),
        ([1], {"logit_bias": {307: 1.0}}, "out of range"),
    ],
)
def test_bad_requests_are_refused_and_disturb_nothing(engine: Engine, prompt, params, words) -> None:
    llm = engine(dtype="float32")
    good = prompts(1)[0]
    with pytest.raises(ValueError, match=words):
        llm.generate([good, {"prompt_token_ids": prompt}], SamplingParams(**params), use_tqdm=False)
    assert llm.engine.loop.idle
    llm.engine.loop.scheduler.check()
    assert len(ids_of(llm, [good], GREEDY)[0]) == 24


@pytest.mark.parametrize(
    "prompt",
    [
        *(3, None, 2.5, True, b"bytes", [None], [3.5], [["a"]], ["a", 3], {"prompt": 3}, {"text": "a"}, {}),
        *({"prompt_token_ids": 3}, {"prompt_token_ids": "ab"}, {"prompt_token_ids": [True]}, (one for one in "ab")),
        *({"prompt": None}, {"prompt": "a", "multi_modal_data": {"image": 1}}, np.array([1, 2]), {"prompt": np.str_}),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_what_is_no_prompt_is_refused_in_one_sentence(engine: Engine, prompt: object) -> None:
    llm = engine(dtype="float32")
    for ask in (llm.generate, llm.embed, lambda one, **_: list(llm.stream(one))):
        with pytest.raises(ValueError, match="must be") as refused:
            ask(prompt, use_tqdm=False)
        assert "\n" not in str(refused.value)
    assert llm.engine.loop.idle


def test_integers_of_numpy_and_what_is_none_are_taken(engine: Engine) -> None:
    llm, ids = engine(dtype="float32"), [5, 6, 7]
    (expected,) = ids_of(llm, [ids], GREEDY)
    numbers = [*np.array(ids)]
    with_nothing = {"prompt": None, "prompt_token_ids": ids, "cache_salt": None}
    for prompt in (numbers, {"prompt_token_ids": numbers}, with_nothing):
        done = llm.generate(prompt, GREEDY, use_tqdm=False, priority=[np.int64(1)], lora_request=None)
        assert done[0].outputs[0].token_ids == expected
        assert {type(one) for one in done[0].prompt_token_ids} == {int}


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 3])
def test_what_are_no_sampling_params_is_refused_in_one_sentence(engine: Engine, params: object) -> None:
    with pytest.raises(ValueError, match="must be SamplingParams"):
        engine(dtype="float32").generate("a", params, use_tqdm=False)


@pytest.mark.parametrize("priority", [[0], [0, "high"], [float("nan"), 0], 1, [True, 0], "ab"])
def test_priorities_that_are_none_are_refused_and_disturb_nothing(engine: Engine, priority: list[object]) -> None:
    llm = engine(dtype="float32")
    with pytest.raises(ValueError, match="priority"):
        llm.generate(prompts(2), GREEDY, use_tqdm=False, priority=priority)
    assert llm.engine.loop.idle
    assert len(ids_of(llm, prompts(1), GREEDY)[0]) == 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_sequences": 3}, "unknown option"),
        ({"dtype": "fp8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cpu:1"}, "processors have no numbers"),
        ({"page_size": 12}, "power of two"),
        ({"max_model_len": 100000}, "max_position_embeddings"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"num_pages": 10**9}, "KV pages"),
        ({"tpot_target_ms": 0}, "tpot_target_ms"),
        ({"tpot_target_ms": float("nan")}, "tpot_target_ms"),
        ({"tpot_target_ms": "20"}, "tpot_target_ms"),
    ],
)
def test_bad_options_are_refused(folder: Path, options, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(folder, **{"device": "cpu", **options})


def test_what_a_start_says_is_neither_wrapped_nor_read_as_markup(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it goes into a file, a line of the log is a line."""
    monkeypatch.setenv("COLUMNS", "20")
    line = "[red] " + 50 * "word "

    def build(config: EngineConfig, log: Callable[[str], None], **others: object) -> SimpleNamespace:
        log(line)
        return SimpleNamespace(loop=None)

    monkeypatch.setattr("strata.engine.llm.build_engine", build)
    LLM(folder, device="cpu", verbose=True)
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("verbose", [None, True, False])
def test_a_start_is_one_line_or_all_of_it_or_none(verbose: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"device": "cpu", "num_pages": 20, "max_num_seqs": 2, "max_model_len": 64}
    LLM(**options) if verbose is None else LLM(**options, verbose=verbose)
    out, told = capsys.readouterr()
    assert out == ""
    assert len(told.splitlines()) == {None: 1, False: 0}.get(verbose, len(told.splitlines()))
    assert ("KV pages" in told, "activations" in told) == (verbose is not False, verbose is True)


def test_what_is_noteworthy_is_told_without_being_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    LLM(device="cpu", num_pages=20, max_num_seqs=2, max_model_len=64, enable_expert_parallel=True)
    told = capsys.readouterr().err
    assert "enable_expert_parallel" in told
    assert "activations" not in told
