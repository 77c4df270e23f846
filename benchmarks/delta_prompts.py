"""Prompts of the gated delta rule on one GPU: parallel chunks beside chunks one after another, in CUDA graphs.

    python -m benchmarks.delta_prompts --steps 1x16384,4x4096,16x1024,1x64,512+255 --save delta_prompts.jsonl

Heads of Qwen3-Next (16 of keys, 32 of values, of 128) in bfloat16, with states that are kept. A step of 4x4096 has four
prompts of 4,096 tokens, one of 512+255 a prompt of 512 beside 255 decodes. `difference`: between both, the root of the
mean square as a share of that of the results. `kernels`: microseconds of each of the three by itself.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.hardware.replay import time_replayed
from strata.kernels.recurrent import delta_chunks_cuda as parallel
from strata.kernels.recurrent import gated_delta_triton as serial
from strata.kernels.recurrent.sequences import GatedDeltaCall
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch

KEY_HEADS, HEADS, DIM = 16, 32, 128
IN_CHUNKS = partial(serial.launch, chunks=True)


def lengths_of(step: str) -> list[int]:
    if "+" in step:
        prompt, decodes = map(int, step.split("+"))
        return [prompt, *[1] * decodes]
    count, length = map(int, step.split("x"))
    return [length] * count


def arguments(lengths: list[int]) -> GatedDeltaCall:
    """As the model has them: queries, keys and values are parts of one product's result, strengths and decays too."""
    tokens, heads = sum(lengths), (KEY_HEADS, KEY_HEADS, HEADS)
    joined = torch.randn(tokens, sum(heads) * DIM, device="cuda").bfloat16()
    rows = [part.unflatten(1, (-1, DIM)) for part in joined.split([each * DIM for each in heads], 1)]
    b, a = torch.randn(tokens, 2 * HEADS, device="cuda").bfloat16().split(HEADS, 1)
    bias, logarithms = (torch.randn(HEADS, device="cuda").bfloat16() for _ in range(2))
    positions = torch.cat([torch.arange(1, 1 + one) for one in lengths]).int().cuda()
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    tensor = torch.randn(len(lengths) + 1, HEADS, DIM, DIM, device="cuda")
    slots = torch.arange(1, len(lengths) + 1, dtype=torch.int32, device="cuda")
    batch = Batch(positions, positions, offsets, max(lengths), states=RecurrentStates(((tensor, tensor),), slots))
    q, k, v = rows
    return GatedDeltaCall(q, k, v, a, b, bias - 3.0, logarithms, batch, 0)


def results(given: GatedDeltaCall) -> list[torch.Tensor]:
    """Of both, from the same states."""
    states = given.batch.states
    assert states is not None
    pool = states.tensors[0][1]
    begun = pool.clone()
    old = IN_CHUNKS(given).float()
    pool.copy_(begun)
    return [old, parallel.launch(given).float()]


class _Silent:
    """In the place of a kernel: launches nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **options: None


def kernel_times(given: GatedDeltaCall) -> dict[str, float]:
    """Scratch is not initialized when a kernel runs by itself; finite numbers of any size take as long."""
    found = {}
    for kernel in parallel.KERNELS:
        others = [other.__name__ for other in parallel.KERNELS if other is not kernel]
        held = {name: getattr(parallel, name) for name in others}
        try:
            for name in others:
                setattr(parallel, name, _Silent())
            found[kernel.__name__] = round(time_replayed([partial(parallel.launch, given)]).seconds * 1e6, 1)
        finally:
            for name, one in held.items():
                setattr(parallel, name, one)
    return found


def measured(step: str) -> dict[str, object]:
    given = arguments(lengths_of(step))
    old, new = results(given)
    difference = ((new - old).square().mean() / old.square().mean()).sqrt().item()
    runs = (partial(IN_CHUNKS, given), partial(parallel.launch, given))
    times = [time_replayed([run]).seconds for run in runs]
    chunks_of_16, in_parallel = (round(seconds * 1e6, 1) for seconds in times)
    found: dict[str, object] = {"test": "gated delta prompts", "step": step, "chunks_of_16_us": chunks_of_16}
    return found | {"parallel_us": in_parallel, "difference": difference, "kernels": kernel_times(given)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="1x16384,4x4096,16x1024,8x128,32x64,1x32,1x64,2048+100,512+60,512+255")
    asked = gpu_arguments(parser)
    lines = GpuLines("benchmarks.delta_prompts", asked.save)
    for step in asked.steps.split(","):
        lines.put(measured(step))


if __name__ == "__main__":
    main()
