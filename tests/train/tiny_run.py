"""The files of tiny training runs: tokenizer, data, a model to start from, and a run's TOML."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.models.families import build
from strata.models.initialize import initialize
from strata.models.save import save
from strata.text.tokenizer import Tokenizer
from strata.train.data.tokenize import tokenize
from strata.train.start import fresh_config
from strata.train.tasks.mixture import document
from strata.train.tasks.vocabulary import make_tokenizer, write_tokenizer
from tests.train.samples import write_lines

Table = dict[str, Any]

LLAMA: Table = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
EXPERTS: Table = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "sleeps", "under", "some", "tree"]
# Of a line of the log, what depends on the clock.
MEASURED = {"seconds", "tokens_per_second", "checkpoint_stall", "slowest_rank", "slowest_share"}


@dataclass(frozen=True)
class Files:
    """Folders. text: several shards of short documents. pairs: preferences. model: of `LLAMA`, untrained."""

    tokenizer: Path
    text: Path
    pairs: Path
    model: Path

    def table(self, out: Path, **changes: Mapping[str, Any]) -> Table:
        """A run of `LLAMA` on `text`, as its TOML file holds it. The rate does not depend on how long the run is, so a
        shorter run is the beginning of a longer one. changes: by section; a value of None removes one.
        """
        table: Table = {
            "run": {"out": str(out), "steps": 3, "seed": 3, "device": "cpu", "log_every": 1, "checkpoint_every": 3},
            "start": {"tokenizer": str(self.tokenizer)},
            "data": {
                "sources": [{"folder": str(self.text)}],
                "tokens_per_pack": 160,
                "packs_per_step": 4,
                "window": 32,
            },
            "optimizer": {"learning_rate": 5e-3},
            "schedule": {"warmup": 1, "decay": 0},
            "model": copy.deepcopy(LLAMA),
        }
        for section, values in changes.items():
            merged = table.get(section, {}) | dict(values)
            table[section] = {key: value for key, value in merged.items() if value is not None}
        return table

    def tuning(self, out: Path, **changes: Mapping[str, Any]) -> Table:
        """The same from the weights of `model`."""
        table = self.table(out, **{"start": {"tokenizer": None, "model": str(self.model)}} | changes)
        del table["model"]
        return table


def write_files(folder: Path) -> Files:
    files = Files(folder / "tokenizer", folder / "text", folder / "pairs", folder / "model")
    files.tokenizer.mkdir(parents=True)
    write_tokenizer(make_tokenizer((document(3, index) for index in range(200)), 600), files.tokenizer, 1024)
    draw = random.Random(1)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, most)))

    texts = [{"text": words(20)} for _ in range(400)]
    pairs = [{"prompt": words(5), "chosen": words(5), "rejected": words(9)} for _ in range(100)]
    for out, records in ((files.text, texts), (files.pairs, pairs)):
        source = out.with_suffix(".jsonl")
        write_lines(source, records)
        tokenize([source], files.tokenizer, out, bytes_per_shard=2**13)
    with Tokenizer.load(files.tokenizer) as tokenizer:
        config = fresh_config(LLAMA, tokenizer)
    model = build(config)
    initialize(model, seed=5)
    save(model, config, files.model, files.tokenizer)
    return files


def write_toml(path: Path, table: Table) -> Path:
    lines = []
    for section, values in table.items():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(one)}' for key, one in value.items())} }}"
    return json.dumps(value)


def log_of(folder: Path) -> list[Table]:
    """The log of a run, which may be writing it."""
    path = folder / "log.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def repeatable(lines: Sequence[Table]) -> list[Table]:
    """What of a log another run with the same numbers writes too."""
    return [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]


def last_checkpoint(folder: Path) -> dict[str, bytes]:
    """The files of a run's last checkpoint."""
    last = max((folder / "checkpoints").glob("step-*"))
    return {f"{last.name}/{file.name}": file.read_bytes() for file in last.iterdir()}
