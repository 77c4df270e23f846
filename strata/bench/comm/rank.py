"""One rank of `strata bench comm`: measures with the others; the first reports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from strata.bench.comm.measure import MeasureRequest, measure
from strata.bench.result import report
from strata.comm.launch import WITHOUT_MULTICAST, join_world
from strata.train.launch import ended_at_once


def main() -> None:
    """The one argument is JSON: what is asked for, the device, where the results go, and where they come from."""
    job = json.loads(sys.argv[1])
    os.environ.update(WITHOUT_MULTICAST)
    save = None if job["save"] is None else Path(job["save"])
    with (
        ended_at_once(lambda error: str(error) if isinstance(error, ValueError) else None),
        join_world(job["device"], timeout_seconds=120) as world,
    ):
        for found in measure(world, MeasureRequest(**job["asked"])):
            if world.is_main:
                report(found.values() | job["provenance"], found.text(), as_json=job["as_json"], save=save)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
