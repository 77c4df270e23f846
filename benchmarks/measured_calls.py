"""Writes the calls of `strata bench kernels --json` from which times are predicted into the package.

Usage: python -m benchmarks.measured_calls benchmarks/results/h200_kernels.jsonl
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from strata.hardware.measured import write
from strata.hardware.prediction import Call

_BF16 = 2
# "32+2*8x128 over 640": query heads, KV heads, head size, keys of each sequence.
_DECODE = re.compile(r"(\d+)\+2\*(\d+)x(\d+) over (\d+)")


def decode_calls(lines: list[dict[str, object]]) -> list[Call]:
    """The decode attention of every model, see `strata.hardware.efficiency.decode_cost`."""
    found = []
    for line in lines:
        match = _DECODE.fullmatch(str(line["shape"]))
        if line["operation"] == "decode_attention" and match is not None:
            heads, kv_heads, size, keys = map(int, match.groups())
            shape = (int(str(line["rows"])), heads // kv_heads, 2 * kv_heads * size * keys * _BF16)
            found.append(("decode", "bfloat16", shape, float(str(line["seconds"]))))
    return found


def main() -> None:
    source = Path(sys.argv[1])
    lines = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    (device,) = {line["device"] for line in lines}
    print(write(device, f"strata bench kernels, {source.name}", decode_calls(lines)))


if __name__ == "__main__":
    main()
