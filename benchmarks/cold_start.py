"""Seconds until an engine is ready on a machine where nothing is compiled yet, and where everything is.

    python benchmarks/cold_start.py 0.6B 8B --turns 2

Each start is a process of its own with random weights and its own folder for compiled kernels, empty the first time
("cold") and as the first start left it the second time ("warm"). The first start of all, whose libraries come from the
disk, is not counted. Prints a line of JSON for each: seconds of `LLM()` and of its phases, and from the start of the
interpreter to the first token; what was compiled after the engine was ready (nothing should be).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="shapes, such as 0.6B")
    parser.add_argument("--turns", type=int, default=2, help="cold and warm starts of each [2]")
    parser.add_argument("--cores", type=int, help="use no more than so many; all if left out")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of the engine [1]")
    asked = parser.parse_args()
    if asked.cores is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked.cores])
    command = shlex.join(["python", *sys.argv])
    with tempfile.TemporaryDirectory() as folder:
        start(asked.models[0], asked.tensor_parallel_size, Path(folder))
    for turn in range(asked.turns):
        for model in asked.models:
            with tempfile.TemporaryDirectory() as folder:
                for kind in ("cold", "warm"):
                    found = start(model, asked.tensor_parallel_size, Path(folder))
                    about = {"kind": kind, "turn": turn, "cores": len(os.sched_getaffinity(0)), "command": command}
                    print(json.dumps(found | about), flush=True)


def start(model: str, ranks: int, folder: Path) -> dict[str, Any]:
    """What a start in a process of its own tells of itself. Raises CalledProcessError if it fails."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "triton"), "STRATA_BEGAN": str(time.time())}
    command = [sys.executable, "-c", _START, model, str(ranks)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


_START = """
import json, os, sys, time
def main():
    began, model, ranks = float(os.environ["STRATA_BEGAN"]), sys.argv[1], int(sys.argv[2])
    import torch
    from strata import LLM, SamplingParams
    from strata.bench.result import make_result
    imported = time.time()
    llm = LLM(model, load_format="dummy", skip_tokenizer_init=True, seed=0, tensor_parallel_size=ranks)
    ready, compilations = time.time(), llm.engine.compilations
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [1] * 16}], params, use_tqdm=False)
    ended = time.time()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result = make_result("start", model, "bf16", [ready - imported], "s", device)
    print(json.dumps(result.values() | {
        "ranks": ranks, "phases": llm.engine.startup,
        "interpreter_to_first_token_seconds": ended - began, "compiled_after_ready": compilations.total,
    }), flush=True)
main()
"""


if __name__ == "__main__":
    main()
