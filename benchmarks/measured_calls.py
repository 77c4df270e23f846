"""Writes the calls of `strata bench kernels --json` from which times are predicted into the package.

Usage: python -m benchmarks.measured_calls h200_kernels.jsonl h200_all_reduce.jsonl, both in benchmarks/results

The second file, whose lines have device, algorithm, ranks, bytes and seconds, may be left out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from strata.hardware.measured import write
from strata.hardware.prediction import Call

_DTYPE, _BYTES = "bfloat16", 2
# "32+2*8x128 over 640": query heads, KV heads, head size, keys of each sequence.
_DECODE = re.compile(r"(\d+)\+2\*(\d+)x(\d+) over (\d+)")
# "prefill 32/8x128 after 4096": query heads, KV heads, head size, cached tokens if there are some.
_PROMPT = re.compile(r"prefill (\d+)/(\d+)x(\d+)(?: after (\d+))?")
# "gate_up 4096->2*14336": width and columns of a weight.
_PRODUCT = re.compile(r"\w+ (\d+)->(?:(\d+)\*)?(\d+)")
# The tables of tuned kernels have all that have fewer.
_PRODUCT_ROWS = 2048
# What passes over memory, and takes a time that follows from the bytes.
_TRAFFIC = (
    "rms_norm", "add_rms_norm", "rope_angles", "rope", "qk_rope_kv_write", "silu_mul", "kv_write", "embedding",
    "gumbel_sample", "token_logprobs",
)  # fmt: skip


def call_of(line: Mapping[str, object]) -> Call | None:
    """The call that a line of `strata bench kernels` has measured; None of what nothing is predicted from."""
    operation, shape, rows = str(line["operation"]), str(line["shape"]), int(str(line["rows"]))
    seconds = float(str(line["seconds"]))
    if operation == "decode_attention" and (match := _DECODE.fullmatch(shape)):
        heads, kv_heads, size, keys = map(int, match.groups())
        return "decode", _DTYPE, (rows, heads // kv_heads, 2 * kv_heads * size * keys * _BYTES), seconds
    if operation == "attention" and (match := _PROMPT.fullmatch(shape)):
        heads, size, cached = int(match[1]), int(match[3]), int(match[4] or 0)
        return "prompt", _DTYPE, (1, heads, rows, cached, size), seconds
    if operation in ("linear", "linear_silu_mul") and rows >= _PRODUCT_ROWS and (match := _PRODUCT.fullmatch(shape)):
        return "product", _DTYPE, (rows, int(match[2] or 1) * int(match[3]), int(match[1])), seconds
    if operation in _TRAFFIC:
        return "traffic", _DTYPE, (round(float(str(line["bandwidth"])) * seconds),), seconds
    return None


def main() -> None:
    source = Path(sys.argv[1])
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    (device,) = {line["device"] for line in lines}
    calls: dict[str, list[Call]] = {}
    if len(sys.argv) > 2:
        sums = [json.loads(line) for line in Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()]
        calls["all_reduce"] = [(one["algorithm"], _DTYPE, (one["ranks"], one["bytes"]), one["seconds"]) for one in sums]
    for line in lines:
        if (call := call_of(line)) is not None:
            calls.setdefault(line["operation"], []).append(call)
    print(write(device, ", ".join(Path(one).name for one in sys.argv[1:]), calls))


if __name__ == "__main__":
    main()
