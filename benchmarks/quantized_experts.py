"""Experts with packed weights on one GPU: microseconds beside the floor, and beside the same in bfloat16.

    python -m benchmarks.quantized_experts --shapes 30B-A3B --schemes fp8,int4 --tokens 1,64,256 --save packed.jsonl
    python -m benchmarks.quantized_experts --tiles --tokens 1,16,64,256   # also every tile that could serve

"experts" is all that a mixture's layer launches behind its router, by the rule and the other ways: order, both
products, and the weighted sum, or of a token alone with values of 8 bits two launches, which --tiles also times with
other parts of the work a program ("choices"). "gate" is the product by gate and up, which fetches the rows and applies
SwiGLU, and "down" the one that follows, their values converted. Choices fall evenly on the experts. Calls are recorded
in a CUDA graph and find none of their weights in the cache. The floor is the larger of the bytes at the memory's
measured rate and the FLOPs at that of the type in which a call multiplies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from strata.hardware.replay import copies_beyond_l2, time_replayed
from strata.hardware.roofline import Workload, floor
from strata.hardware.specs import recognize
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.moe.calls import ExpertsCall
from strata.kernels.moe.experts import CHOICES, CONVERTED, ROUNDED, experts
from strata.kernels.moe.grouped import GroupedTile, choose_tile, fitting, group_of, grouped_product, reads_quantized
from strata.kernels.moe.local_order import local_order
from strata.kernels.moe.small_m import QUANTIZED_TILES, ChoiceTile, by_choices
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, pack
from strata.kernels.quant.schemes import SCHEMES
from strata.models.config import config_from_dict
from strata.models.shapes import SHAPES

_IN_8_BITS = {"e4m3": "float8", "int8": "int8"}


def draw(count: int, out: int, width: int, scheme: Scheme) -> QuantizedWeight:
    """Random weights of all experts, packed an expert at a time."""
    made = [pack(torch.randn(out, width, device="cuda") * width**-0.5, scheme) for _ in range(min(count, 4))]
    fields = {name: torch.stack([getattr(made[e % len(made)], name) for e in range(count)]) for name in made[0].tensors}
    return made[0].with_tensors(fields)


def copied(weight: QuantizedWeight) -> QuantizedWeight:
    return weight.with_tensors({name: field.clone() for name, field in weight.tensors.items()})


def took(calls: Sequence[Callable[[], Any]], guess: float) -> float:
    """Microseconds of a call."""
    return 1e6 * time_replayed(calls, estimate=guess).seconds


def measure(shape: str, scheme_name: str, tokens: int, every_tile: bool) -> Iterator[dict[str, Any]]:
    config = config_from_dict(SHAPES[shape], shape)
    sizes = config.experts
    assert sizes is not None
    count, per_token, hidden, width = sizes.count, sizes.per_token, config.hidden_size, sizes.intermediate_size
    scheme = SCHEMES[scheme_name]
    first = draw(count, 2 * width, hidden, scheme), draw(count, hidden, width, scheme)
    used = min(1.0, tokens * per_token / count)
    again = copies_beyond_l2(int(used * (first[0].nbytes + first[1].nbytes))) - 1
    layers = [first, *((copied(first[0]), copied(first[1])) for _ in range(again))]
    plain = [
        [
            torch.randn(count, *size, device="cuda", dtype=torch.bfloat16)
            for size in ((2 * width, hidden), (hidden, width))
        ]
        for _ in range(again // 2 + 1)
    ]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, per_token, device="cuda")
    chosen = torch.rand(tokens, count, device="cuda").topk(per_token).indices
    arguments = x, weights, chosen, *first
    cost = experts.cost(*arguments, workload=Workload((tokens,), (tokens,)))
    guess = cost.bytes / 2e12 + cost.flops / 5e14
    beside = took([partial(experts.bind("cuda"), x, weights, chosen, *one) for one in plain], 3 * guess)
    about = {"shape": shape, "scheme": scheme_name, "tokens": tokens}
    bound = experts.bind("cuda", packed=True)
    rule = bound.choose(*arguments)
    for run in bound.candidates:
        # The rule of how many rows are rounded aside, all that could run.
        can_round = run.name == ROUNDED and all(reads_quantized(x, one) for one in first)
        if run.name not in (rule.name, CONVERTED) and not can_round:
            continue
        eight = _IN_8_BITS[scheme.values] if run.name == ROUNDED else "bfloat16"
        device = recognize(torch.cuda.get_device_name())
        least = None if device is None else 1e6 * floor(cost, device, eight).seconds
        us = took([partial(run.run, ExpertsCall(x, weights, chosen, *one)) for one in layers], guess)
        yield about | {
            "part": "experts",
            "implementation": run.name,
            "is_rule": run is rule,
            "us": round(us, 2),
            "floor_us": None if least is None else round(least, 2),
            "of_floor": None if least is None else round(least / us, 3),
            "bf16_us": round(beside, 2),
            "over_bf16": round(beside / us, 3),
            "weights_gb_per_s": round(cost.weights / us / 1e3),
            "tflops": round(cost.flops / us / 1e6, 1),
        }
    for parts in choice_parts(per_token) if every_tile and rule.name == CHOICES else ():
        us = took([partial(by_choices, ExpertsCall(x, weights, chosen, *one), parts) for one in layers], guess)
        yield about | {
            "part": "choices",
            "tile": [part._asdict() for part in parts],
            "is_rule": parts == QUANTIZED_TILES,
            "us": round(us, 2),
            "weights_gb_per_s": round(cost.weights / us / 1e3),
        }
    order, rows = local_order(chosen, 0, count), tokens * per_token
    inner = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

    def multiply(part: str, layer: tuple[QuantizedWeight, QuantizedWeight], tile: GroupedTile) -> Tensor:
        if part == "down":
            return grouped_product(inner, layer[1], order.ends, tile=tile)
        fetched: dict[str, Any] = {"source": order.source, "per_token": per_token, "gated": True}
        return grouped_product(x, layer[0], order.ends, **fetched, tile=tile)

    for part, weight in zip(("gate", "down"), first, strict=True):
        chosen_tile = choose_tile(rows, weight, gated=part == "gate")
        assert chosen_tile is not None
        hit = chosen.unique().numel() * weight.nbytes / count
        for tile in {chosen_tile: None, **dict.fromkeys(tiles(weight, rows, part == "gate") if every_tile else ())}:
            us = took([partial(multiply, part, layer, tile) for layer in layers], guess)
            yield about | {
                "part": part,
                "tile": tile._asdict(),
                "is_rule": tile == chosen_tile,
                "us": round(us, 2),
                "weights_gb_per_s": round(hit / us / 1e3),
            }


def choice_parts(per_token: int) -> Iterator[tuple[ChoiceTile, ChoiceTile]]:
    """Of either launch those whose sums fit in registers, the other as in the rule."""
    of_gate, of_sum = QUANTIZED_TILES
    for columns, width, warps in product((2, 4, 8), (512, 1024, 2048), (4, 8)):
        if 8 <= columns * width // (32 * warps) <= 64:
            yield ChoiceTile(columns, width, warps), of_sum
    for columns, width, warps in product((1, 2, 4), (128, 256, 512), (4, 8)):
        each = columns * next_power_of_2(per_token) * width // (32 * warps)
        if (columns, width, warps) != of_sum and 8 <= each <= 64:
            yield of_gate, ChoiceTile(columns, width, warps)


def tiles(weight: QuantizedWeight, rows: int, gated: bool) -> Iterator[GroupedTile]:
    """Those that are neither far too high nor far too low for so many rows of an expert."""
    each, group = rows / weight.shape[0], group_of(weight)
    for height, columns, width, warps, stages, steps in (
        *((height, 64, width, 2, 3, steps) for height in (8, 16, 32) for width in (64, 128) for steps in (1, 2)),
        *((height, 64, 64, 2, 3, 4) for height in (16, 32)),
        *((height, 32, 128, 2, 4, 1) for height in (8, 16, 32)),
        *((height, 32, 64, warps, 3, 2) for height in (32, 64) for warps in (2, 4)),
        *((height, 64, 64, 4, 4, 1) for height in (16, 32, 64, 128)),
        *((height, 128, 64, 8, 4, 1) for height in (32, 64, 128)),
    ):
        whole = not group or group % width == 0 or (weight.kind == "e2m1" and width % group == 0)
        if whole and height / 4 <= max(4, each) and each <= 8 * height:
            yield fitting(GroupedTile(height, columns, width, warps, stages, steps=steps), weight, gated=gated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="30B-A3B,gpt-oss-20b", help="mixtures, by name")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--tokens", default="1,4,16,64,128,256,8192", help="of a step")
    parser.add_argument("--tiles", action="store_true", help="time every tile that could serve")
    asked = gpu_arguments(parser)
    lines = GpuLines("benchmarks.quantized_experts", asked.save)
    for shape in asked.shapes.split(","):
        for scheme in asked.schemes.split(","):
            for tokens in map(int, asked.tokens.split(",")):
                for found in measure(shape, scheme, tokens, asked.tiles):
                    lines.put(found)


if __name__ == "__main__":
    main()
