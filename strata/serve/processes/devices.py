"""Which GPUs each of several engines of a server gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def engine_devices(
    engines: int, ranks: int, device: str, environment: Mapping[str, str], files: Path = Path("/dev")
) -> list[dict[str, str]]:
    """Variables of the environment of each engine: GPUs of its own, one for each rank, in order. Nothing where one
    engine has all that there are, or none has any.

    device: the engines' option. files: where the GPUs' device files are; torch, which would count them, takes seconds
        to load and memory to keep. Raises ValueError if there are too few.
    """
    if engines == 1 or device == "cpu":
        return [{}] * engines
    if device.startswith("cuda:"):
        raise ValueError(
            f"device {device!r} is one GPU, data_parallel_size={engines} needs one for each engine: give cuda, and "
            f"choose among GPUs by the environment variable {VARIABLE}"
        )
    listed = environment.get(VARIABLE)
    if listed is None:
        found = sorted(int(file.name[6:]) for file in files.glob("nvidia[0-9]*") if file.name[6:].isdecimal())
        names = [str(at) for at in range(len(found))]
    else:
        names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names and device == "auto":
        return [{}] * engines
    if len(names) < engines * ranks:
        raise ValueError(
            f"data_parallel_size={engines} with {ranks} ranks each needs {engines * ranks} GPUs, and there "
            f"are {len(names)}: ask for fewer, or show more by {VARIABLE}"
        )
    return [{VARIABLE: ",".join(names[engine * ranks : (engine + 1) * ranks])} for engine in range(engines)]
