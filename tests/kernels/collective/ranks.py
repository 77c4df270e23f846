"""The ranks of `test_all_reduce`: the kernels in Triton's interpreter, with inboxes in files that all ranks map.

The interpreter runs the programs of a kernel one after another in the order of their indices, so each finds its peers
in the other processes. It knows no assembly: an atomic addition of nothing reads flags instead.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strata.comm import all_reduce_cuda as launches
from strata.comm.all_reduce_cuda import one_shot_gather
from strata.comm.experts import rows
from strata.comm.mesh import Axis
from strata.comm.symmetric import InboxLayout, SymmetricMemory
from strata.kernels.collective import all_reduce, quantized_shards
from strata.kernels.collective.one_shot_flags import FLAG_PROGRAMS
from strata.kernels.linear.small_m import SmallMProduct, multiply
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.triton_import import tl, triton

from ..interpreter import prepare_interpreter

CALLS = 4
SHAPES = {
    "one_shot": [(3, 130), (40, 64)],
    "two_shot": [(3, 130), (70, 130)],
    "one_shot_norm": [(3, 132), (2, 132)],
    "flag_norm": [(3, 132), (5, 132)],
    "gather_rows": [(3, 130), (40, 64)],
    "gather_columns": [(3, 130), (40, 64)],
    "gather_keys": [(33, 4), (300, 4)],
    "scatter_sums": [(4, 130), (40, 64)],
}
# Products that are sent, in float16, in calls by turns: tile, rows, width. The last goes over its edges.
SENT = (
    (SmallMTile("gemv", 8, 128, 4), 3, 128),
    (SmallMTile("gemv", 4, 64, 4), 1, 192),
    (SmallMTile("dot", 32, 64, 4, rows=16), 5, 192),
)
SENT_COLUMNS = 136
DTYPES = {"float32": torch.float32, "float16": torch.float16}
GROUPS = ((2, "float32"), (2, "float16"), (4, "float32"))


@triton.jit
def _read(places):
    return tl.atomic_add(places, 0)


def numbers(rank: int, call: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """What a rank adds to a sum: other numbers in each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)


def norm_inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The residual and the weights, which all ranks have."""
    return numbers(50, 0, shape, dtype), numbers(51, 0, shape, dtype)[0]


def sent_inputs(rank: int, call: int) -> tuple[SmallMTile, Tensor, Tensor, Tensor]:
    """The tile, x and the weight of a rank, and the residual, which all ranks have."""
    tile, rows, width = SENT[call % len(SENT)]
    x, weight = (
        numbers(rank, call, (rows, width), torch.half),
        numbers(60 + rank, call, (SENT_COLUMNS, width), torch.half),
    )
    return tile, x, weight / 8, numbers(50, call, (rows, SENT_COLUMNS), torch.half)


def run_sent(axis: Axis, rank: int, call: int) -> tuple[Tensor, ...]:
    """A product that is sent with the sum and the norm behind it, which must be those of a product that is stored."""
    tile, x, weight, residual = sent_inputs(rank, call)
    norm_weight = numbers(51, 0, (1, SENT_COLUMNS), torch.half)[0]
    launches._tile = lambda x, weight: tile
    found = launches.gemm_all_reduce_norm(x, axis, weight, residual, norm_weight, 1e-5)
    (stored,) = multiply(SmallMProduct(x, weight), tile)
    for one, other in zip(found, launches.one_shot_norm(stored, axis, residual, norm_weight, 1e-5), strict=True):
        assert torch.equal(one, other), (tile, call)
    return found


def run_rank(folder: Path, rank: int, ranks: int, dtype: torch.dtype) -> None:
    all_reduce._acquired = _read
    launches.PROGRAMS = launches.FLAG_PROGRAMS = 2  # so that a program takes several rows
    words = InboxLayout.of(ranks).end
    boxes = [torch.from_file(str(folder / f"inbox-{peer}"), True, words, dtype=torch.int32) for peer in range(ranks)]
    peers = torch.tensor([box.data_ptr() for box in boxes])
    memory = SymmetricMemory(boxes[rank], peers, torch.zeros(3, FLAG_PROGRAMS, dtype=torch.int32), None)
    axis = Axis("tp", ranks, rank, tuple(range(ranks)), None, symmetric=memory)
    found = {}
    for call in range(CALLS):
        for name, shapes in SHAPES.items():
            x = numbers(rank, call, shapes[call % 2], dtype)
            given = (*norm_inputs(x.shape, dtype), 1e-5) if name.endswith("norm") else ()
            if rank == call % ranks:
                time.sleep(0.02)  # now this rank is late, now that
            result = _launcher(name)(x, axis, *given)
            found[f"{name} {call}"] = [one.tolist() for one in (result if isinstance(result, tuple) else (result,))]
        found[f"sent {call}"] = [one.tolist() for one in run_sent(axis, rank, call)]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def _launcher(name: str) -> Callable[..., Any]:
    if name == "gather_columns":
        return partial(one_shot_gather, dim=-1)
    if name == "gather_keys":
        return lambda x, axis: one_shot_gather(x.view(torch.int64), axis, 1).view(x.dtype)
    return getattr(rows if name in ("gather_rows", "scatter_sums") else launches, name)


def run_parts(folder: Path) -> None:
    """Whether the kernels of rounded parts give what their references do, of odd and of even sizes."""
    found = []
    for ranks, width in ((2, 1160), (3, 7)):
        numbers = torch.randn(2, 5, ranks * width, generator=torch.Generator().manual_seed(width))
        x = numbers[0] * numbers[1].mul(3).exp()
        x[1], x[2, 3], x[4, 0] = 0.0, float("inf"), float("nan")
        sent = quantized_shards.quantize_shards.reference(x, ranks)
        total = quantized_shards.sum_shards.reference(sent, width)
        wide = quantized_shards.dequantize_shards.reference(sent, width, torch.float32)
        found += [
            _same_parts(quantized_shards._round(x, ranks), sent, width),
            _same_parts(quantized_shards._sum(sent, width), total, width),
            torch.equal(quantized_shards._widen(sent, width, torch.float32).nan_to_num(1e9), wide.nan_to_num(1e9)),
        ]
    (folder / "parts.json").write_text(json.dumps(found))


def _same_parts(found: Tensor, wanted: Tensor, width: int) -> bool:
    """But for signs of zeros, and what fills parts up."""
    behind = -(-width // 16) * 16
    exponents = slice(behind, behind - (-width // quantized_shards.GROUP))
    values, others = (one[..., :width].contiguous().view(torch.float8_e4m3fn).float() for one in (found, wanted))
    return torch.equal(found[..., exponents], wanted[..., exponents]) and torch.equal(values, others)


def main() -> None:
    """One group of ranks after another, as forks of this process: it has imported what all of them need."""
    folder, forks = Path(sys.argv[1]), multiprocessing.get_context("fork")
    prepare_interpreter()
    run_parts(folder)
    for ranks, name in GROUPS:
        own = folder / f"{ranks}-{name}"
        own.mkdir()
        for rank in range(ranks):
            with (own / f"inbox-{rank}").open("wb") as inbox:
                inbox.truncate(4 * InboxLayout.of(ranks).end)
        started = [
            forks.Process(target=run_rank, args=(own, rank, ranks, DTYPES[name]), daemon=True) for rank in range(ranks)
        ]
        for one in started:
            one.start()
        for one in started:
            one.join(100)
            assert one.exitcode == 0, (ranks, name)


if __name__ == "__main__":
    main()
