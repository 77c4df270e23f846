"""What constrained decoding costs: output tokens per second of requests that follow a JSON schema, and of free ones.

Random weights in the 0.6B shape with a made-up tokenizer (words, pieces of JSON, other scripts), so nothing is
downloaded. The schema is an array of records that is never long enough, so that every request yields exactly the asked
number of tokens; the free requests ignore the end of sequence. Both kinds run in turn, grammars compiled within the
time, and medians are compared.

    python benchmarks/structured_output.py
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from strata import LLM, SamplingParams, StructuredOutputsParams
from strata.bench.result import number, provenance
from strata.models.shapes import SHAPES

SHAPE = "0.6B"
PROMPT_TOKENS = 512
WARMUP_TOKENS = 16


def records(bounded: bool) -> dict[str, Any]:
    """A schema of records without end. bounded: strings have a most length, whose masks take long near that bound."""

    def string(most: int) -> dict[str, Any]:
        return {"type": "string", "maxLength": most} if bounded else {"type": "string"}

    address = closed_object(street=string(40), zip={"type": "string", "pattern": r"^\d{5}$"})
    record = closed_object(
        name=string(40),
        age={"type": "integer", "minimum": 0, "maximum": 150},
        role={"enum": ["admin", "editor", "reader", None]},
        active={"type": "boolean"},
        score={"type": "number", "minimum": 0, "maximum": 100},
        joined={"type": "string", "format": "date"},
        tags={"type": "array", "items": string(16), "maxItems": 5},
        address=address,
    )
    return {"type": "array", "items": record, "minItems": 100_000}


def closed_object(**properties: Any) -> dict[str, Any]:
    """An object with these properties, all of them and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def made_up_tokenizer(size: int, eos_id: int) -> Tokenizer:
    """A byte-level tokenizer of `size` entries, one of which ends a sequence."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    texts = _texts(random.Random(0))
    while len(tokens) < size - 1:
        tokens[spell.pre_tokenize_str(next(texts))[0][0]] = None
    entries = list(tokens)
    entries.insert(eos_id, "<end>")
    made = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(entries)}, merges=[]))
    made.pre_tokenizer, made.decoder = spell, decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<end>", special=True)])
    return made


def _texts(chance: random.Random) -> Iterator[str]:
    """What vocabularies hold: three quarters words, then other scripts, then punctuation; first pieces of JSON."""
    yield from ('":', '": "', '", "', '"},', '{"', '"}', '[{"', '"]', ' "', '": [', "},\n", "  ", "    ", "        ")
    while True:
        before = chance.choice(("", " "))
        kind = chance.random()
        if kind < 0.75:
            syllables = (
                chance.choice("bcdfghklmnprstvwz") + chance.choice("aeiou") for _ in range(chance.randint(1, 4))
            )
            word = "".join(syllables) + chance.choice("lnrst ").strip()
            yield before + (word.capitalize() if chance.random() < 0.2 else word)
        elif kind < 0.9:
            first, count = chance.choice(((0x430, 32), (0x4E00, 8000), (0x3041, 80), (0xAC00, 8000), (0x5D0, 27)))
            yield before + "".join(chr(first + chance.randrange(count)) for _ in range(chance.randint(1, 3)))
        else:
            yield "".join(chance.choice("(){}[]<>=+-*/.,;:!?_\"'#$%&|~^\\") for _ in range(chance.randint(2, 4)))


def write_checkpoint(folder: Path) -> None:
    """All that an engine needs of a model whose weights are random."""
    config = SHAPES[SHAPE]
    (folder / "config.json").write_text(json.dumps(config))
    made_up_tokenizer(config["vocab_size"], config["eos_token_id"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def timed(llm: LLM, requests: int, output: int, schema: dict[str, Any] | None) -> float:
    """Output tokens per second of so many requests at once; free ones without a schema."""
    chance = random.Random(1)
    size = llm.engine.config.vocab_size
    prompts = [{"prompt_token_ids": [chance.randrange(size) for _ in range(PROMPT_TOKENS)]} for _ in range(requests)]
    options: dict[str, Any] = {"ignore_eos": True}
    if schema is not None:
        options = {"structured_outputs": StructuredOutputsParams(json=schema)}
    began = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.6, max_tokens=output, **options), use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = [len(sample.token_ids) for answer in outputs for sample in answer.outputs]
    assert tokens == [output] * requests, "a request ended early, so the kinds cannot be compared"
    return sum(tokens) / seconds


def measure(llm: LLM, requests: int, output: int, repeat: int, bounded: bool) -> dict[str, Any]:
    """Every run of both kinds, the medians, and how much of the free requests' speed the constrained ones have."""
    schemas = {"free": None, "constrained": records(bounded)}
    rates: dict[str, list[float]] = {kind: [] for kind in schemas}
    for schema in schemas.values():
        timed(llm, requests, WARMUP_TOKENS, schema)
    for _ in range(repeat):
        for kind, schema in schemas.items():
            rates[kind].append(timed(llm, requests, output, schema))
    free, constrained = (statistics.median(found) for found in rates.values())
    return {
        "test": f"structured-output{'-bounded' if bounded else ''}-b{requests}",
        "model": SHAPE,
        "unit": "tok/s",
        "free": free,
        "constrained": constrained,
        "ratio": constrained / free,
        "all": rates,
        "device": str(llm.engine.ledger.device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=int, default=512, help="tokens of each request")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bounded", action="store_true", help="a schema whose strings have a most length")
    parser.add_argument("--save", type=Path, help="append the result to this JSON-lines file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        llm = LLM(folder, load_format="dummy", enable_prefix_caching=False, max_num_seqs=max(asked.requests, 32))
    result = measure(llm, asked.requests, asked.output, asked.repeat, asked.bounded)
    free, constrained = number(result["free"]), number(result["constrained"])
    print(f"{asked.requests} requests: free {free} tok/s, constrained {constrained} tok/s: {result['ratio']:.1%}")
    command = shlex.join(["python", "benchmarks/structured_output.py", *sys.argv[1:]])
    line = json.dumps(result | provenance() | {"command": command})
    print(line)
    if asked.save is not None:
        with asked.save.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
