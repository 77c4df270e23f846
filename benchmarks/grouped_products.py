"""The two products of a mixture's experts on one GPU: microseconds, weights a second and FLOP/s, the library's beside.

    python -m benchmarks.grouped_products --shapes 30B-A3B,V2-Lite --tokens 1,64,256,8192 --save grouped.jsonl

"gate" is the product by gate and up, which fetches the rows and applies SwiGLU; the library's stands without those two.
Choices fall evenly on the experts. Calls are recorded in a CUDA graph and find none of their weights in the cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.kernels.moe.grouped import choose_tile, grouped_product
from strata.kernels.moe.local_order import local_order
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES

CALLS, REPEATS = 6, 5


def microseconds(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Of one of the calls, the median of some replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 1e3 * statistics.median(times[1:]) / len(calls)


def measure(shape: str, tokens: int, gated: bool) -> dict[str, object]:
    """One line of the results."""
    config = config_from_dict(SHAPES[shape], shape)
    experts = config.experts
    assert experts is not None
    count, per_token, hidden, width = experts.count, experts.per_token, config.hidden_size, experts.intermediate_size
    inputs, out = (hidden, 2 * width) if gated else (width, hidden)
    layers = [torch.randn(count, out, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    chosen = [torch.rand(tokens, count, device="cuda").topk(per_token).indices for _ in range(CALLS)]
    orders = [local_order(one, 0, count) for one in chosen]
    x = torch.randn(tokens if gated else tokens * per_token, inputs, device="cuda", dtype=torch.bfloat16)
    rows = x[orders[0].source // per_token] if gated else x

    def ours(call: int) -> Tensor:
        weight, order = layers[call % 2], orders[call]
        if not gated:
            return grouped_product(x, weight, order.ends)
        return grouped_product(x, weight, order.ends, source=order.source, per_token=per_token, gated=True)

    def library(call: int) -> Tensor:
        return torch._grouped_mm(rows, layers[call % 2].transpose(1, 2), offs=orders[call].ends)

    took = microseconds([partial(ours, call) for call in range(CALLS)])
    beside = microseconds([partial(library, call) for call in range(CALLS)])
    hit = statistics.mean(len(one.unique()) for one in chosen)
    tile = choose_tile(tokens * per_token, layers[0], gated=gated)
    assert tile is not None
    return {
        "shape": shape,
        "product": "gate" if gated else "down",
        "tokens": tokens,
        "tile": tile._asdict(),
        "us": round(took, 2),
        "library_us": round(beside, 2),
        "weights_gb_per_s": round(hit * layers[0][0].nbytes / took / 1e3),
        "tflops": round(2 * tokens * per_token * layers[0][0].numel() / took / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="30B-A3B,V2-Lite,gpt-oss-20b,granite-4.0-h-tiny")
    parser.add_argument("--tokens", default="1,8,64,128,256,1024,8192")
    asked = gpu_arguments(parser)
    lines = GpuLines("benchmarks.grouped_products", asked.save)
    for shape in asked.shapes.split(","):
        for tokens in map(int, asked.tokens.split(",")):
            for gated in (True, False):
                lines.put(measure(shape, tokens, gated))


if __name__ == "__main__":
    main()
