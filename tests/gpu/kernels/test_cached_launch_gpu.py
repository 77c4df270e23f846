"""Held launches on a GPU: whatever comes after what, each launch computes with the binary for its own arguments."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.jit import JITFunction

from strata.kernels import cached_launch
from strata.kernels.triton_import import jit

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and cached_launch.HOLDS), reason="needs a GPU and Triton 3.6"
)


@jit
def scale_rows(x, weight, out, rows, width, stride, factor, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + column, mask=column < width, other=0.0) * factor
    if WEIGHTED:
        values *= tl.load(weight + column, mask=column < width, other=0.0)
    tl.store(out + row * width + column, values, mask=(column < width) & (row < rows))


def launch(x: Tensor, weight: Tensor | None, factor: float, warps: int) -> Tensor:
    rows, width = x.shape
    out = torch.full((rows, width), float("nan"), dtype=x.dtype, device=x.device)
    scale_rows[(rows,)](
        x,
        weight,
        out,
        rows,
        width,
        x.stride(0),
        factor,
        BLOCK=256,
        WEIGHTED=weight is not None,
        num_warps=warps,
    )
    return out


def test_random_launches_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    run = JITFunction.run

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        asked.append(args)
        return run(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "run", counted)
    rng = random.Random(3)
    for _ in range(400):
        dtype = rng.choice([torch.float32, torch.bfloat16])
        rows, width, offset = rng.choice([1, 2, 16, 33]), rng.choice([1, 16, 100, 240]), rng.choice([0, 1, 8, 16])
        stride = rng.choice([width, 256, 250])
        memory = torch.randn(40 * 256 + 16, device="cuda").to(dtype)
        x = memory[offset : offset + 33 * stride].as_strided((rows, width), (max(stride, width), 1))
        weight = rng.choice([None, torch.randn(width, device="cuda").to(dtype), torch.nn.Parameter(memory[1:][:width])])
        factor = rng.choice([0.5, 2.0])
        expected = x.float() * factor * (1.0 if weight is None else weight.detach().float())
        found = launch(x, weight, factor, rng.choice([1, 4])).float()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert 0 < len(asked) < 300  # others were held


def test_a_tensor_in_the_hosts_memory_is_refused_after_others_were_held() -> None:
    x = torch.randn(4, 16, device="cuda")
    for _ in range(3):
        launch(x, None, 0.5, 4)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        launch(x.cpu(), None, 0.5, 4)


def test_a_held_launch_is_recorded_in_a_graph_and_runs_on_the_current_stream() -> None:
    x, outs = torch.randn(4, 16, device="cuda"), []
    launch(x, None, 0.5, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs.append(launch(x, None, 0.5, 4))
    x.fill_(3.0)
    graph.replay()
    torch.testing.assert_close(outs[0], torch.full_like(x, 1.5))
