"""How a step is divided among kernels of attention: every row once, and cuDNN sees few shapes."""

from __future__ import annotations

import random

import pytest
import torch

from strata.kernels.attention.batch_parts import BLOCK, LEAST_QUERIES, BatchParts, LibraryCall, divide, library_reach

LONG = 1 << 20


def rows_of(parts: BatchParts, new: list[int]) -> list[str]:
    """Who attends for each row, by what the parts say."""
    owners = ["nobody"] * sum(new)

    def claim(first: int, last: int, owner: str) -> None:
        for row in range(first, last):
            assert owners[row] == "nobody"
            owners[row] = owner

    claim(0, parts.decodes, "decode")
    for call in parts.library:
        claim(call.row, call.row + call.sequences * call.rows, "library")
    end = 0
    for start, count in zip(parts.starts.tolist(), new, strict=True):
        end += count
        claim(start, end, "pages")
    return owners


def test_every_row_has_one_kernel() -> None:
    draw = random.Random(7)
    for _ in range(300):
        decodes, prompts = draw.randrange(4), draw.randrange(6)
        cached = [draw.randrange(1, 9000) for _ in range(decodes)]
        new = [1] * decodes
        for _ in range(prompts):
            cached.append(draw.choice([0, 0, 16, 700, 512, 4096, draw.randrange(5000)]))
            new.append(draw.choice([512, 1024, 2048, draw.randrange(2, 4000)]))
        parts = divide(cached, new, draw.choice([0, 3000, LONG]))
        owners = rows_of(parts, new)
        assert "nobody" not in owners
        assert owners.count("decode") == parts.decodes == decodes
        assert owners.count("pages") == parts.left


def test_the_library_sees_whole_blocks_only() -> None:
    draw = random.Random(8)
    for _ in range(300):
        cached, new = draw.choice([0, 16, draw.randrange(9000)]), draw.randrange(2, 9000)
        for call in divide([cached], [new], LONG).library:
            assert call.rows >= LEAST_QUERIES
            assert call.rows <= new
            assert (call.lead + call.rows) % BLOCK == 0
            assert (call.cached - call.lead) % BLOCK == 0
            assert new - call.rows < BLOCK, "as many rows as blocks hold"


def test_fresh_prompts_alike_share_a_call() -> None:
    parts = divide([9, 0, 0, 0, 0, 0], [1, 2048, 2048, 512, 512, 3000], LONG)
    assert parts.library == (
        LibraryCall(sequence=1, sequences=2, row=1, rows=2048, cached=0),
        LibraryCall(sequence=3, sequences=2, row=4097, rows=512, cached=0),
        LibraryCall(sequence=5, sequences=1, row=5121, rows=2560, cached=0),
    )
    assert parts.left == 3000 - 2560


def test_prompts_alike_that_go_on_have_a_call_each() -> None:
    calls = divide([1024, 1024], [1024, 1024], LONG).library
    assert [(call.sequence, call.row, call.cached) for call in calls] == [(0, 0, 1024), (1, 1024, 1024)]


def test_few_queries_and_long_sequences_stay_with_the_kernel_over_pages() -> None:
    assert not divide([0, 0], [512, 600], LONG).library
    assert not divide([4096], [1023], LONG).library
    assert not divide([0], [4096], reach=4095).library
    assert divide([0], [4096], reach=4096).library


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 128), (torch.bfloat16, 256), (torch.bfloat16, 100), (torch.float16, 12)]
)
def test_what_the_library_cannot_do(dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert library_reach(dtype, head_dim, (), 4096) == 0
    assert library_reach(torch.bfloat16, 128, (), 4096) == 4096
    assert library_reach(torch.bfloat16, 128, (None, 1024, 2048), 4096) == 1024, "it knows no windows"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert library_reach(torch.bfloat16, 128, (), 4096) == 0
