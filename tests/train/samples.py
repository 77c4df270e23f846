"""What tests of training share: rows as a file, a chat template, the documents of a sample as a loader reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from strata.comm.launch import World
from strata.train.data.encoding import Document
from strata.train.data.mixture import DatasetReader
from strata.train.data.shards import TokenDataset

ALONE = World(0, 0, 1, torch.device("cpu"), None)
SHARE = "rank-00000.safetensors"


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """A JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def template(turn: str = "{{ m.content }}", before: str = "", prompt: str = "<|assistant|>") -> str:
    """A chat template. before: all turns. prompt: for generation."""
    return (
        f"{before}{{% for m in messages %}}<|{{{{ m.role }}}}|>{turn}<|end|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def sample(dataset: TokenDataset, number: int) -> list[Document]:
    """One document, or two of a preference."""
    made = DatasetReader([dataset]).documents(np.zeros(1, np.int64), np.array([number]))
    return [Document(made.tokens[start:end], made.loss_mask[start:end]) for start, end in pairwise(made.offsets)]
