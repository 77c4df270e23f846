"""`strata bench comm`: collectives between ranks, each implementation beside the model of the link."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from strata.bench.result import provenance
from strata.cli import options
from strata.cli.bench.options import Repeat, Report
from strata.cli.groups import Values, grouped

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZES = "1KiB, 8KiB, 64KiB, 512KiB, 4MiB, 32MiB"


@grouped
def comm(
    *,
    operations: Annotated[
        str, typer.Option(help="all, or some of all_reduce, all_gather, reduce_scatter, all_to_all between commas.")
    ] = "all",
    sizes: Annotated[
        str, typer.Option(help="Bytes that each rank hands in, of an all-gather that it gets; 64KiB, several.")
    ] = _SIZES,
    ranks: Annotated[int | None, typer.Option(min=2, help="How many; all GPUs, or 2 processes on a CPU.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu (gloo) or cuda (NCCL and own kernels).")] = "auto",
    engine: Annotated[Values, options.engine("dtype", dtype="bfloat16")],
    repeat: Repeat = 9,
    to: Report,
) -> None:
    """Time collectives by size and algorithm: in CUDA graphs on GPUs, whole calls over gloo on a CPU.

    Beside each: a library's call by the alpha-beta model of the device's link, and the floor, its messages alone.

    Example: strata bench comm --operations all_reduce --sizes 8KiB,64KiB --save comm.jsonl
    """
    import torch

    from strata.bench.comm.measure import COLLECTIVES, MeasureRequest
    from strata.models.config import DTYPES
    from strata.train.launch import launch

    dtype = engine["dtype"]
    asked = list(COLLECTIVES) if operations == "all" else operations.split(",")
    if unknown := [name for name in asked if name not in COLLECTIVES]:
        raise ValueError(f"--operations {unknown[0]!r} is unknown; known are {', '.join(COLLECTIVES)}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is unknown; known are {', '.join(DTYPES)}")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {device!r} is unknown; give auto, cpu or cuda")
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    chosen = "cuda" if device == "cuda" or (device == "auto" and gpus > 1) else "cpu"
    count = ranks if ranks is not None else gpus if chosen == "cuda" else 2
    if chosen == "cuda" and (gpus < count or count < 2):
        raise ValueError(f"{max(count, 2)} ranks need a GPU each, and there are {gpus}; --device cpu measures gloo")
    job = {
        "asked": asdict(MeasureRequest(asked, parse_sizes(sizes), dtype, repeat)),
        "device": chosen,
        "as_json": to.as_json,
        "save": None if to.save is None else str(to.save),
        "provenance": provenance(),
    }
    code = launch([sys.executable, "-m", "strata.bench.comm.rank", json.dumps(job)], count)
    if code:
        raise typer.Exit(code)


def parse_sizes(text: str) -> list[int]:
    """The bytes of "8KiB,1MiB". Raises ValueError for anything else."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,12})(|KiB|MiB|GiB)", part.strip())
        if match is None or int(match[1]) == 0:
            raise ValueError(f"--sizes takes bytes, such as 512, 8KiB or 1MiB, several between commas, not {part!r}")
        found.append(int(match[1]) * _UNITS[match[2]])
    return found
