"""Products by packed weights on CUDA: the kernels in Triton's interpreter, and which of them serve which call."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
import torch

from strata.kernels.quant import dequantize
from strata.kernels.quant.packed import PackedWeight, Scheme, unpacked_values

from .assembly import halves, run


def test_kernels_equal_their_references() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernels.linear.interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "equal\n"


# All bytes, each in each of the four places.
WORDS = [bytes((first + 64 * place) % 256 for place in range(4)) for first in range(256)]


@pytest.mark.parametrize(
    ("name", "kind", "less"),
    [("INT8", "int8", 0), ("WIDE_INT8", "int8", 0), ("INT4", "int4", 8), ("UINT4", "int4", 0), ("E2M1", "e2m1", 0)],
)
def test_assembly_unpacks_every_byte(name: str, kind: str, less: int) -> None:
    pytest.importorskip("triton")
    text = getattr(dequantize, f"{name}_ASSEMBLY").value
    words = torch.tensor([list(word) for word in WORDS], dtype=torch.uint8)
    stored = words.view(torch.int8) if kind == "int8" else words
    wanted = unpacked_values(PackedWeight.of(Scheme(kind, 1, 0), stored, torch.ones(256, 1))) - less
    for word, exact in zip(WORDS, wanted.tolist(), strict=True):
        results = run(text, int.from_bytes(word, "little"), 2 if name == "INT8" else 4)
        if name == "WIDE_INT8":
            found = list(struct.unpack("<4f", struct.pack("<4I", *results)))
        else:
            found = [number for result in results for number in halves(result)]
        if kind != "int8":  # the low halves of all bytes come first
            found = [found[half * 4 + place] for place in range(4) for half in range(2)]
        assert found == exact
