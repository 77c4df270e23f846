"""Products by weights that are 2:4 sparse, on one GPU, beside dense ones in bfloat16 and 8 bits: us and TFLOP/s.

    python -m benchmarks.sparsity.products --save sparse.jsonl                     # 8B, 8,192 rows
    python -m benchmarks.sparsity.products --rows 1,16,64,256,1024,4096,8192       # also the kernels for few rows

Of each way one line a product, and at last one of a layer's four products together, with how many times faster than
dense bfloat16 it is. TFLOP/s count the zeros' FLOPs, too; `off` is the relative error against the dense product in
float32. A way that a library or device refuses has the text of the error in its line, and the next one is tried.
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from benchmarks.gpu_lines import GpuLines, gpu_arguments
from benchmarks.quantized_products import MODELS
from strata.hardware.replay import time_replayed
from strata.hardware.roofline import Cost, floor
from strata.hardware.specs import recognize
from strata.kernels.linear.linear import linear
from strata.kernels.quant.expand import expand_on_device
from strata.kernels.quant.quantized import QuantizedWeight, pack
from strata.kernels.quant.schemes import SPARSITIES
from strata.kernels.quant.two_of_four import smallest_two_of_four

DENSE = "dense bf16"
# Fewer rows are timed in a recorded graph, where that can be: launches from the host would take longer than they do.
_EAGER_ROWS = 1024
_SECONDS = 0.2
# Algorithms of cuSPARSELt that are timed each by itself; it stops at the first that there is not.
_MAX_ALGORITHMS = 64

Call = Callable[[], Tensor]


class Operands:
    """x [rows, width], a weight [out, width] that is 2:4 sparse, and its forms."""

    def __init__(self, rows: int, out: int, width: int) -> None:
        drawn = torch.randn(out, width, device="cuda", dtype=torch.bfloat16)
        self.weight = drawn.masked_fill(smallest_two_of_four(drawn.abs()), 0.0)
        self.x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        self.packed: QuantizedWeight = pack(self.weight, SPARSITIES["2:4"])

    @property
    def in_8_bits(self) -> tuple[Tensor, Tensor, Tensor]:
        """x and weight in e4m3, which both reach with scales of 1, and that scale."""
        one = torch.ones((), device="cuda")
        return self.x.to(torch.float8_e4m3fn), self.weight.to(torch.float8_e4m3fn), one


def dense_fp8(given: Operands) -> Call:
    x, weight, _ = given.in_8_bits
    rows = torch.ones(len(x), 1, device="cuda")
    columns = torch.ones(1, len(weight), device="cuda")
    return lambda: torch._scaled_mm(
        x, weight.t(), scale_a=rows, scale_b=columns, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def semi_structured(given: Operands, cutlass: bool) -> Call:
    """torch's tensor subclass."""
    SparseSemiStructuredTensor._FORCE_CUTLASS = cutlass
    weight = to_sparse_semi_structured(given.weight)
    return lambda: F.linear(given.x, weight)


def sparse_fp8(given: Operands) -> Call:
    """cuSPARSELt takes the sparse operand first, so the result is the transposed product."""
    SparseSemiStructuredTensor._FORCE_CUTLASS = False
    x, weight, one = given.in_8_bits
    sparse = to_sparse_semi_structured(weight)
    return lambda: torch._scaled_mm(sparse, x.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16).t()


def library(given: Operands, algorithm: int | None) -> Call:
    """cuSPARSELt by one of its algorithms; None: by the one that its own search finds."""
    operand = torch._cslt_compress(given.weight)
    if algorithm is None:
        algorithm = int(torch._cslt_sparse_mm_search(operand, given.x.t(), transpose_result=True))
    return partial(torch._cslt_sparse_mm, operand, given.x.t(), transpose_result=True, alg_id=algorithm)


def ways(given: Operands) -> Iterator[tuple[str, Callable[[], Call]]]:
    """A name and what makes the call, in order; those of Strata are all that serve so many rows."""
    yield DENSE, lambda: partial(F.linear, given.x, given.weight)
    yield "dense fp8, scales of rows, activations rounded before", partial(dense_fp8, given)
    yield "2:4 torch, cusparselt", partial(semi_structured, given, False)
    yield "2:4 torch, cutlass", partial(semi_structured, given, True)
    yield "2:4 cusparselt, searched algorithm", partial(library, given, None)
    yield "2:4 fp8 torch, cusparselt", partial(sparse_fp8, given)
    for implementation in linear.bind("cuda", packed=True).candidates:
        name = implementation.name
        fits = implementation.supports is None or implementation.supports(given.x, given.packed, None)
        if fits and name not in ("reference", "unpacked, cublas", "of a frozen weight"):
            yield f"Strata: {name}", partial(_bound, implementation.run, given)


def parts(given: Operands) -> Iterator[tuple[str, Callable[[], Call]]]:
    """What making the library's order in each call would take beside the product."""
    yield "part: expanded", lambda: partial(expand_on_device, given.packed)
    yield "part: compressed for cusparselt", lambda: partial(torch._cslt_compress, given.weight)


def _bound(run: Callable[..., Tensor], given: Operands) -> Call:
    return partial(run, given.x, given.packed, None)


def attempt(make: Callable[[], Call], wanted: Tensor | None, seconds_of: Callable[[Call], float]) -> dict[str, Any]:
    """Seconds of a call in us and how far its result is off, or the text of what it raised."""
    try:
        call = make()
        found: dict[str, Any] = {}
        if wanted is not None:
            made = call()
            if made.shape != wanted.shape:
                raise ValueError(f"result is {list(made.shape)}, not {list(wanted.shape)}")
            found["off"] = round(float((made.float() - wanted).norm() / wanted.norm()), 5)
        return {"us": round(1e6 * seconds_of(call), 2)} | found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def eager_seconds(call: Call) -> float:
    """Seconds of a call that is launched again and again, by events, after some of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 3
    while True:
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        seconds = start.elapsed_time(end) / 1e3
        if seconds >= _SECONDS:
            return seconds / count
        count = max(count + 1, min(100 * count, int(1.2 * count * _SECONDS / max(seconds, 1e-6))))


def seconds_of(name: str, rows: int) -> Callable[[Call], float]:
    """Calls of cuSPARSELt are not recorded: whether they can be is for the library to say."""
    if rows >= _EAGER_ROWS or "cusparselt" in name or "torch" in name:
        return eager_seconds
    return lambda call: float(time_replayed([call]).seconds)


def measure(out: int, width: int, rows: int, algorithms: bool) -> Iterator[dict[str, Any]]:
    given = Operands(rows, out, width)
    wanted = given.x.float() @ given.weight.float().t()
    device, flops = recognize(torch.cuda.get_device_name()), 2 * rows * out * width
    moved = 2 * rows * (width + out)
    costs = {
        "dense fp8": Cost(flops, read=out * width + moved),
        "dense": Cost(flops, read=2 * out * width + moved),
        "2:4 fp8": Cost(flops / 2, read=out * width * 5 / 8 + moved),
    }
    sparse = Cost(flops / 2, read=given.packed.nbytes + moved)
    asked = [*ways(given), *parts(given)]
    if algorithms:
        asked += [(f"2:4 cusparselt, algorithm {one}", partial(library, given, one)) for one in range(_MAX_ALGORITHMS)]
    for name, make in asked:
        part = name.startswith("part")
        found = attempt(make, None if part else wanted, seconds_of(name, rows))
        line = {"way": name} | found
        if "us" in found and not part:
            line["tflops"] = round(flops / found["us"] / 1e6, 1)
            if device is not None:
                cost = next((cost for start, cost in costs.items() if name.startswith(start)), sparse)
                rate = "float8" if "fp8" in name else "bfloat16"
                line["floor_us"] = round(1e6 * floor(cost, device, rate).seconds, 2)
        yield line
        if "error" in found and ", algorithm " in name:
            return


def totals(lines: list[Mapping[str, Any]], products: int) -> Iterator[dict[str, Any]]:
    """Of each way that made all products, their time together, and how many times dense bfloat16 that is."""
    times: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if "us" in line and not line["way"].startswith("part"):
            times[line["way"]].append(line["us"])
    dense = sum(times[DENSE])
    for way, found in times.items():
        if len(found) == products:
            yield {"product": "all", "way": way, "us": round(sum(found), 2), "over_bf16": round(dense / sum(found), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B", choices=sorted(MODELS))
    parser.add_argument("--rows", default="8192")
    parser.add_argument("--algorithms", action="store_true", help="also every algorithm of cuSPARSELt by itself")
    asked = gpu_arguments(parser)
    warnings.filterwarnings("ignore", message="The PyTorch API of SparseSemiStructuredTensor")
    cusparselt = torch.backends.cusparselt.version()
    lines = GpuLines("benchmarks.sparsity.products", asked.save, cusparselt=cusparselt)
    for rows in map(int, asked.rows.split(",")):
        found: list[Mapping[str, Any]] = []
        for name, (out, width) in MODELS[asked.model].items():
            for line in measure(out, width, rows, asked.algorithms):
                found.append(line)
                lines.put({"model": asked.model, "product": name, "rows": rows} | line)
        for line in totals(found, len(MODELS[asked.model])):
            lines.put({"model": asked.model, "rows": rows} | line)


if __name__ == "__main__":
    main()
