"""T1 to T4 on one engine, through its `LLM`: the requests of `strata bench`, and lines as it saves them.

    python -m benchmarks.peers.offline --engine vllm --model 8B --save results.jsonl

Run it from the root of the repository, with the Python that the engine is installed for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import (
    ENGINES,
    SETUP,
    add_ranks,
    add_save,
    add_weights,
    append,
    count,
    device_name,
    how_loaded,
    now,
    refuse_other_weights,
    whose_weights,
    write_config,
)
from strata.bench import workloads
from strata.bench.result import Result, make_result
from strata.bench.run import WARMUP_TOKENS
from strata.models.shapes import SHAPES

TESTS = ("T1", "T2", "T3-b8", "T3-b32", "T3-b128", "T4")


def results(
    engine: Any,
    model: str,
    tests: Sequence[workloads.InferenceTest],
    repeat: int,
    more: Mapping[str, Any],
    weights: Path | None = None,
) -> Iterator[Result]:
    """The result of each test on one `LLM`, each after a short form of it. engine: the module of `LLM`; more: options
    of it beside those of every comparison; weights: the folder that it loads, without which it draws its own."""
    longest = max([workloads.MAX_MODEL_LEN, *(test.longest for test in tests)])
    options = SETUP | how_loaded(weights) | {"max_model_len": longest} | more
    with tempfile.TemporaryDirectory() as made:
        if weights is None:
            write_config(Path(made), model)
        folder = made if weights is None else str(weights)
        llm = engine.LLM(model=folder, skip_tokenizer_init=True, enable_prefix_caching=False, seed=0, **options)
        for test in tests:
            call(engine, llm, test, WARMUP_TOKENS)
            values = [test.value(call(engine, llm, test)) for _ in range(repeat)]
            yield make_result(
                test.name, model, str(more.get("quantization", SETUP["dtype"])), values, test.unit, device_name()
            )


def call(engine: Any, llm: Any, test: workloads.InferenceTest, most: int | None = None) -> float:
    """Seconds of one `generate` with the requests of a test, each cut to `most` output tokens if that is given.

    Raises RuntimeError if a request did not yield as many tokens as it was asked for.
    """
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in test.prompts]
    lengths = [output if most is None else min(output, most) for output in test.outputs]
    params = [
        engine.SamplingParams(temperature=test.temperature, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in lengths
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    yielded = [len(output.outputs[0].token_ids) for output in outputs]
    if yielded != lengths:
        raise RuntimeError(f"{test.name} asked for {sum(lengths)} output tokens and got {sum(yielded)}")
    return seconds


def test_names(text: str) -> list[str]:
    """Names of tests, from "T1,T3-b32"."""
    names = text.split(",")
    for name in names:
        try:
            named(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def named(name: str) -> workloads.InferenceTest:
    """A test of `strata bench`; with -cN behind it, as in T2-c32768 or T3-b128-c4096, its prompts have N tokens."""
    test, behind, length = name.partition("-c")
    found = workloads.named(test)
    if not behind:
        return found
    if not (length.isdecimal() and int(length)):
        raise ValueError(f"test {name!r}: give the tokens of a prompt behind -c, as in T2-c32768")
    return replace(found, name=name, prompts=workloads.random_prompts(len(found.prompts), int(length)))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of a comparison, too."""
    parser.add_argument("--tests", type=test_names, default=list(TESTS), help=f"between commas [{','.join(TESTS)}]")
    parser.add_argument("--repeat", type=count, default=3, help="timed calls of each test [3]")


def given(asked: argparse.Namespace) -> dict[str, Any]:
    """Options of `LLM`, the same for every engine, that differ from their defaults."""
    options = {"quantization": asked.quantization, "kv_cache_dtype": asked.kv_cache_dtype}
    if asked.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = asked.tensor_parallel_size
    return {name: value for name, value in options.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--model", choices=SHAPES, default="0.6B", help="a shape [0.6B]")
    add_options(parser)
    add_ranks(parser)
    add_weights(parser)
    parser.add_argument("--quantization", help="of weights: fp8 [none]")
    parser.add_argument("--kv-cache-dtype", help="of keys and values: fp8 [that of the weights]")
    add_save(parser)
    parser.add_argument("--run", default=now(), help="what the run is told by that the lines belong to [the time]")
    parser.add_argument("--turn", type=int, default=0, help="which turn of that run this is [0]")
    asked = parser.parse_args()
    refuse_other_weights(parser, asked.weights, [asked.model])
    if importlib.util.find_spec(asked.engine) is None:
        where = "give the Python that it is installed for (benchmarks/peers/README.md)"
        parser.error(f"--engine {asked.engine}: {sys.executable} does not have it: {where}")
    engine = importlib.import_module(asked.engine)
    more = given(asked)
    origin = {
        "engine": asked.engine,
        "version": engine.__version__,
        **({"tensor_parallel_size": 1} | more),
        "weights": whose_weights(asked.weights),
        "run": asked.run,
        "turn": asked.turn,
        "command": shlex.join(["python", "-m", "benchmarks.peers.offline", *sys.argv[1:]]),
    }
    tests = [named(name) for name in asked.tests]
    for result in results(engine, asked.model, tests, asked.repeat, more, asked.weights):
        append(asked.save, result.values() | origin)
        print(f"{asked.engine} {result.text()}", flush=True)


if __name__ == "__main__":
    main()
