"""A model folder with random weights, so that both engines compute with the same ones.

    python -m benchmarks.peers.weights --model V2-Lite --out /dev/shm/V2-Lite

Matrices are normal with deviation 0.02 (the initializer_range of these families), biases 0 and norms 1, in bfloat16,
under the names of published checkpoints. On a GPU it draws them there; the numbers of a CPU are others.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.engines import write_model
from benchmarks.peers.processes import end_on_signals
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.initialize import dummy_values
from strata.models.save import save
from strata.models.shapes import SHAPES

DTYPE = torch.bfloat16
SEED = 0
GIB = 2**30
# How much more than the weights the files may take: headers, the index, a tokenizer.
MARGIN = 32 * 2**20
# Of the weights made, how much there is from one line of progress to the next.
STEP = 4 * GIB


def write(folder: Path, shape: str, device: torch.device) -> None:
    """Config, weights and a tokenizer (`engines.write_model`) of a shape; the folder appears when its weights do.

    Holds a shard of at most 5 GiB and a layer on the device, and a shard on the host. Raises ValueError for a folder
    that is not empty and a disk with too little room, and OSError where it cannot be written.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not an empty folder; give a new or an empty one")
    with torch.device("meta"):
        model = build(config_from_dict(SHAPES[shape], shape)).to(DTYPE)
    size = sum(parameter.nbytes for parameter in model.parameters())
    require_room(folder, shape, size + MARGIN)
    values = told(dummy_values(model, SEED, device, DTYPE), size)
    save(model, config_from_dict(SHAPES[shape], shape), folder, values=values)
    write_model(folder, shape)  # its config.json is the shape's own, word for word


def require_room(folder: Path, shape: str, size: int) -> None:
    """Raises ValueError if the disk that a folder is to lie on has less than `size` bytes left."""
    disk = next(parent for parent in folder.absolute().parents if parent.is_dir())
    room = shutil.disk_usage(disk).free
    if room < size:
        raise ValueError(
            f"{folder}: {shape} takes {size / GIB:.1f} GiB and its disk has {room / GIB:.1f} left; give a folder "
            f"elsewhere or make room"
        )


def told(values: Iterable[tuple[str, Tensor]], size: int) -> Iterator[tuple[str, Tensor]]:
    """The values, with a line for every `STEP` bytes of them, of `size` in all."""
    began, made = time.monotonic(), 0
    for name, value in values:
        before, made = made, made + value.nbytes
        yield name, value
        if made // STEP > before // STEP:
            seconds = time.monotonic() - began
            print(f"  {made / GIB:.1f} of {size / GIB:.1f} GiB after {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, required=True, help="a shape")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="a new or an empty folder")
    asked = parser.parse_args()
    end_on_signals()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    print(f"{asked.model}: random weights made on {device.type}, into {asked.out}", flush=True)
    try:
        write(asked.out, asked.model, device)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"{asked.model}: done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
