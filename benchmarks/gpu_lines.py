"""What a program here measured on a GPU: lines of JSON that say on which, from which commit and by which command."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from strata.bench.result import provenance


def gpu_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What the program was asked for, `--save` with it. Where torch sees no GPU the program ends with exit code 2."""
    parser.add_argument("--save", type=Path, help="append the lines to this file")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and torch sees none")
    return asked


class GpuLines:
    """Prints each line as soon as it is there, and appends it to `save`.

    module: of the program, as `python -m` takes it. about: what else is the same in all lines.
    """

    def __init__(self, module: str, save: Path | None, **about: Any) -> None:
        command = shlex.join(["python", "-m", module, *sys.argv[1:]])
        self._about = {"device": torch.cuda.get_device_name(), **about, **provenance(), "command": command}
        self._save = save

    def put(self, found: Mapping[str, Any]) -> None:
        line = json.dumps({**found, **self._about})
        print(line, flush=True)
        if self._save is not None:
            with self._save.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
