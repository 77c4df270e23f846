"""The picture of latency against load, from the newest sweep of a results file.

    python benchmarks/plot_serve.py          # needs matplotlib; writes docs/serving.svg

A sweep is one call of `strata bench serve` with several rates and --save benchmarks/results/h200_serve.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strata.bench.load.plot import plot_latency

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "h200_serve.jsonl"
PICTURE = HERE.parent / "docs" / "serving.svg"


def newest_sweep(path: Path) -> list[dict[str, Any]]:
    """The results of the sweep that began last. Raises ValueError if there are none."""
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not results:
        raise ValueError(f"{path} has no results")
    return [result for result in results if result["started"] == results[-1]["started"]]


if __name__ == "__main__":
    plot_latency(newest_sweep(RESULTS), PICTURE)
