"""Constrained decoding: masks against all outputs that a grammar has, and what it must leave as it was."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from strata import LLM, SamplingParams, StructuredOutputsParams
from strata.engine.grammars.grammar import GrammarCompiler, Masks
from strata.engine.grammars.matchers import takes_end
from strata.engine.outputs import RequestOutput
from strata.text.special_tokens import SpecialTokens
from strata.text.tokenizer import Tokenizer
from tests.engine.grammars.test_closed_objects import json_grammar
from tests.serve.random_schemas import random_schema

Engine = Callable[..., LLM]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days", "notes"],
    "additionalProperties": False,
}


def follows(schema: dict[str, Any], **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 200, "seed": 5, **options}, structured_outputs=StructuredOutputsParams(json=schema)
    )


def regex(pattern: str, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 40, "seed": 5, **options}, structured_outputs=StructuredOutputsParams(regex=pattern)
    )


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | list[SamplingParams], run_ahead: bool = False
) -> list[RequestOutput]:
    llm.engine.loop._run_ahead = run_ahead
    try:
        outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    finally:
        llm.engine.loop._run_ahead = False
    assert llm.engine.loop.idle
    llm.engine.loop.scheduler.check()
    return outputs


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def assert_follows(output: RequestOutput, schema: dict[str, Any]) -> None:
    for sample in output.outputs:
        assert sample.finish_reason == "stop", (sample.text, output.error)
        jsonschema_rs.validate(schema, json.loads(sample.text))


MERGES = [("a", "b"), ("b", "c"), ("ab", "c"), ("a", "a"), ("c", "ab"), ("bc", "a"), ("c", "a")]
TOKENS = ["<end>", "a", "b", "c", "d", *("".join(pair) for pair in MERGES)]
"""A vocabulary in which a text has many ways to be written."""


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    backend = Backend(models.BPE(vocab={token: id for id, token in enumerate(TOKENS)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, SpecialTokens({"eos_token": AddedToken("<end>", special=True)}, (), ()), {})


def allowed(masks: Masks, matchers: Sequence[LLMatcher | None], size: int) -> list[set[int] | None]:
    under_way = masks.start(matchers)
    assert under_way is not None
    sent = under_way.send(torch.device("cpu"))
    bits = np.unpackbits(sent[0].numpy().view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, size:].any()
    return [None if which < 0 else set(np.flatnonzero(bits[which]).tolist()) for which in sent[1].tolist()]


def test_masks_are_those_that_trying_every_id_gives(tiny: Tokenizer) -> None:
    """At each way to write the beginning of an output: the ids that lead to one of all outputs, and no others.

    Only where all outputs go on alike, it may be the one id that the tokenizer itself would write next.
    """
    texts = ["a", "ab", "abc", "abca", "cab", "cabca", "aaaa", "bcbc", "d"]
    compiler = GrammarCompiler(tiny, [0], len(TOKENS))
    masks = Masks(len(TOKENS), 2, torch.device("cpu"))
    ways = [("", compiler.compile(StructuredOutputsParams(choice=texts).to_grammar()))]
    open_ways = forced_ways = 0
    while ways:
        text, matcher = ways.pop()
        rests = [one.removeprefix(text) for one in texts if one.startswith(text)]
        going_on = {id for id, token in enumerate(TOKENS) if id and any(rest.startswith(token) for rest in rests)}
        wanted = going_on | ({0} if "" in rests else set())
        free, found = allowed(masks, [None, matcher], len(TOKENS))
        assert free is None
        if found != wanted:
            assert found == {tiny.encode(os.path.commonprefix(rests))[0]}, text  # noqa: RUF071 (of characters)
            forced_ways += 1
        open_ways += found == wanted
        for id in going_on & found:
            longer = matcher.deep_copy()
            assert not takes_end(longer, id)
            ways.append((text + TOKENS[id], longer))
    assert open_ways > 20
    assert forced_ways < open_ways


def test_an_end_is_an_end_whether_or_not_the_output_could_go_on(tiny: Tokenizer) -> None:
    compiler = GrammarCompiler(tiny, [0], len(TOKENS))
    for pattern in ("a", "a*"):
        matcher = compiler.compile(StructuredOutputsParams(regex=pattern).to_grammar())
        assert not takes_end(matcher, TOKENS.index("a"))
        assert takes_end(matcher, 0)


def test_a_vocabulary_may_be_larger_or_smaller_than_the_logits(tiny: Tokenizer) -> None:
    for rows in (5, 100):
        compiler = GrammarCompiler(tiny, [0], rows)
        matcher = compiler.compile(StructuredOutputsParams(regex="a+").to_grammar())
        masks = Masks(max(rows, len(TOKENS)), 1, torch.device("cpu"))
        assert allowed(masks, [matcher], len(TOKENS)) == [{TOKENS.index("a"), TOKENS.index("aa")}]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("chunk", [5, 512])
def test_constrained_requests_leave_the_others_as_they_were(engine: Engine, run_ahead: bool, chunk: int) -> None:
    llm = engine(dtype="float32", deterministic=True, max_num_batched_tokens=chunk)
    prompts = [[7, 8, 9, 10, 11, 12], [3, 4], list(range(20)), [5]]
    sampled = SamplingParams(temperature=0.9, seed=11, max_tokens=30, ignore_eos=True)
    special = SamplingParams(temperature=0.9, seed=11, max_tokens=30, repetition_penalty=1.2, logprobs=1)
    free = [sampled, SamplingParams(temperature=0, max_tokens=30), special, sampled]
    alone = [run(llm, [prompt], params)[0] for prompt, params in zip(prompts, free, strict=True)]
    mixed = [one for pair in zip(free, [follows(SCHEMA), regex("[a-z]{5,20}")] * 2, strict=True) for one in pair]
    outputs = run(llm, [prompt for prompt in prompts for _ in range(2)], mixed, run_ahead)
    assert ids_of(outputs[::2]) == ids_of(alone)
    assert outputs[4].outputs[0].logprobs == alone[2].outputs[0].logprobs
    for output in outputs[1::4]:
        assert_follows(output, SCHEMA)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_p": 0.9, "top_k": 30}, {"presence_penalty": 0.5}, {}])
def test_running_ahead_draws_the_same(engine: Engine, options: dict[str, Any]) -> None:
    llm = engine(dtype="float32")
    prompts = [[1, 2, 3], [4, 5], list(range(9))]
    params = follows(SCHEMA, n=1 if options.get("temperature") == 0 else 3, **options)
    ahead = run(llm, prompts, params, run_ahead=True)
    assert ids_of(ahead) == ids_of(run(llm, prompts, params))
    for output in ahead:
        assert_follows(output, SCHEMA)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_preemption_changes_nothing(engine: Engine, run_ahead: bool) -> None:
    prompts = [[7 * i % 300 for i in range(20 + one)] for one in range(6)]
    params = follows(SCHEMA)
    crowded = engine(dtype="float32", num_pages=16, enable_prefix_caching=False)
    want = ids_of(run(engine(dtype="float32"), prompts, params))
    before = crowded.engine.loop.scheduler.statistics.preemptions
    assert ids_of(run(crowded, prompts, params, run_ahead)) == want
    assert crowded.engine.loop.scheduler.statistics.preemptions > before


def test_samples_follow_the_grammar_each_on_its_own(engine: Engine) -> None:
    (output,) = run(engine(dtype="float32"), [[1, 2]], follows(SCHEMA, n=8), run_ahead=True)
    assert_follows(output, SCHEMA)
    assert len({sample.text for sample in output.outputs}) > 1


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    """The report of the first token shows what the model found likeliest, though the mask has ruled it out."""
    llm = engine(dtype="float32")
    (plain,) = run(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    (constrained,) = run(llm, [[1, 2, 3]], follows(SCHEMA, temperature=0, logprobs=3))
    free, kept = plain.outputs[0], constrained.outputs[0]
    assert free.logprobs is not None
    assert kept.logprobs is not None
    drawn = kept.logprobs[0].pop(kept.token_ids[0])
    assert kept.logprobs[0] == free.logprobs[0]
    assert drawn.rank > 3
    assert drawn.logprob < min(entry.logprob for entry in free.logprobs[0].values())


def test_ends(engine: Engine) -> None:
    """A complete output ends with "stop" whatever else is asked; one that may go on obeys `min_tokens`."""
    llm = engine(dtype="float32")
    complete = [
        regex("[ab]{4}"),
        regex("[ab]{4}", ignore_eos=True),
        regex("[ab]{4}", min_tokens=20),
        regex("[ab]{4}", logit_bias={0: -100.0}, presence_penalty=1.0),
    ]
    for output in run(llm, [[1, 2]] * 4, complete, run_ahead=True):
        (sample,) = output.outputs
        assert (sample.finish_reason, sample.stop_reason, len(sample.text)) == ("stop", None, 4)
    (longer, limited) = run(llm, [[1, 2]] * 2, [regex("[ab]*", min_tokens=15), regex("[ab]*", max_tokens=3)])
    assert len(longer.outputs[0].token_ids) >= 15
    assert len(limited.outputs[0].token_ids) <= 3


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_grammar_that_fails_on_the_way_ends_its_request_alone(engine: Engine, run_ahead: bool) -> None:
    """So many properties that the parser gives up once the object has begun."""
    llm = engine(dtype="float32", deterministic=True)
    many = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1500)}}
    params = [follows(SCHEMA), follows(many, n=2), SamplingParams(temperature=0, max_tokens=20)]
    good, failed, free = run(llm, [[1, 2], [3], [4, 5]], params, run_ahead)
    assert_follows(good, SCHEMA)
    assert [sample.finish_reason for sample in failed.outputs] == ["error", "error"]
    assert failed.error is not None
    assert "kept to its grammar" in failed.error
    assert "\n" not in failed.error
    assert ids_of([free]) == ids_of(run(llm, [[4, 5]], params[2]))


def test_nothing_left_to_draw_fails_one_request(engine: Engine) -> None:
    """The grammar wants an "a", the bias forbids all that begin with it."""
    llm = engine(dtype="float32")
    tokenizer = llm.get_tokenizer()
    starts = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id).startswith(b"a")]
    bad = regex("a+", bad_words=[tokenizer.decode([id]) for id in starts])
    failed, good = run(llm, [[1], [2]], [bad, follows(SCHEMA)])
    assert failed.outputs[0].finish_reason == "error"
    assert_follows(good, SCHEMA)


def test_grammars_compile_while_the_engine_works(engine: Engine) -> None:
    """One that takes seconds delays no step; what is cancelled is never told."""
    llm = engine(dtype="float32")
    tokenizer = llm.get_tokenizer()
    compiler = GrammarCompiler(tokenizer, [0], 307)
    slow = json_grammar({"type": "integer", "allOf": [{"multipleOf": prime} for prime in (97, 89, 31)]})
    compiler.start("slow", slow)
    compiler.start("cancelled", json_grammar(SCHEMA))
    compiler.cancel("cancelled")
    compiler.cancel("unknown")
    compiler.start("wrong", "start: [")
    assert compiler.pending
    steps, longest, told = 0, 0.0, {}
    for _ in llm.stream({"prompt_token_ids": [1]}, SamplingParams(max_tokens=200, ignore_eos=True)):
        began = time.perf_counter()
        told |= dict(compiler.ready())
        longest = max(longest, time.perf_counter() - began)
        steps += 1
    assert longest < 0.5  # "slow" takes seconds
    assert steps == 200
    deadline = time.monotonic() + 60
    while compiler.pending and time.monotonic() < deadline:
        told |= dict(compiler.ready())
        time.sleep(0.01)
    compiler.close()
    assert told.keys() == {"slow", "wrong"}
    assert isinstance(told["slow"], LLMatcher)
    assert isinstance(told["wrong"], str)
    assert "\n" not in told["wrong"]


def test_a_tokenizer_that_cannot_be_read_refuses_grammars_and_nothing_else() -> None:
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    compiler = GrammarCompiler(Tokenizer(backend, SpecialTokens({}, (), ()), {}), [], 2)
    with pytest.raises(ValueError, match="this model's tokenizer"):
        compiler.compile(json_grammar(SCHEMA))


def test_the_built_in_model_writes_what_schemas_ask() -> None:
    """Thirty of them at once."""
    llm = LLM(device="cpu", num_pages=2000)
    schemas = [random_schema(seed, closed=True) for seed in range(30)]
    params = [follows(schema, max_tokens=600, frequency_penalty=1.0) for schema in schemas]
    outputs = llm.generate(["Answer in JSON."] * 30, params, use_tqdm=False)
    for schema, output in zip(schemas, outputs, strict=True):
        assert_follows(output, schema)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": r"[a-z]{3}-\d{2}/x"}, r"[a-z]{3}-\d{2}/x"),
        ({"choice": ["yes", 'no "é"', "a/b\\"]}, r'yes|no "é"|a/b\\'),
        ({"grammar": 'start: "(" (start | NAME) ")"\nNAME: /[xy]{2}/'}, r"\(+[xy]{2}\)+"),
        ({"json": '{"const": 7}'}, "7"),
    ],
)
def test_what_an_output_may_have_to_be(engine: Engine, given: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(max_tokens=100, seed=1, n=4, structured_outputs=StructuredOutputsParams(**given))
    (output,) = run(engine(dtype="float32"), [[1, 2]], params)
    for sample in output.outputs:
        assert re.fullmatch(pattern, sample.text), sample.text


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": "ab"}, {"choice": ["a", ""]}, {"choice": [1]}),
        *({"json": 5}, {"json": []}, {"regex": 5}, {"grammar": b"a"}, {"json_object": False}),
    ],
)
def test_structured_outputs_are_asked_in_one_way(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"exactly one|(json|regex|choice|grammar|json_object) must be"):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"json": "{"}, "no JSON"),
        ({"json": '{"minimum": 1%s}' % ("0" * 400)}, "number out of range"),
        ({"json": '{"type": "number", "minimum": 1, "exclusiveMaximum": 1e999}'}, "Infinity|expected value"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "nests too deep"),
        ({"json": '{"items":' * 700 + "{}" + "}" * 700}, "nests too deep"),
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"regex": "(a"}, "regex parse error: unclosed group"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"grammar": "begin: x"}, "cannot be followed"),
    ],
)
def test_a_wrong_grammar_is_refused_before_anything_runs(engine: Engine, given: dict[str, Any], match: str) -> None:
    llm = engine(dtype="float32")
    good = SamplingParams(max_tokens=4)
    with pytest.raises(ValueError, match=match) as caught:
        run(llm, [[1], [2]], [good, SamplingParams(structured_outputs=StructuredOutputsParams(**given))])
    assert "\n" not in str(caught.value)
    assert llm.engine.loop.idle
