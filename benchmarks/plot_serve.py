"""The picture of latency against load, from the newest sweep of benchmarks/results/h200_serve.jsonl.

    python benchmarks/plot_serve.py          # needs matplotlib; writes docs/serving.svg

A sweep is one call of `strata bench serve` with rates in percent (25%,50%,75%,90%) of a saturation that it measured,
and --save benchmarks/results/h200_serve.jsonl.
"""

from __future__ import annotations

import argparse
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
    sweeps = [result["started"] for result in results if result["saturation"] is not None]
    if not sweeps:
        raise ValueError(f"{path} has no sweep: make one with strata bench serve --request-rate 25%,50%,75%,90% --save")
    return [result for result in results if result["started"] == sweeps[-1]]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    plot_latency(newest_sweep(RESULTS), PICTURE)


if __name__ == "__main__":
    main()
