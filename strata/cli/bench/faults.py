"""`strata bench faults`: a server over ranks loses one after the other under load, and must come back each time."""

from __future__ import annotations

from typing import Annotated

import typer

from strata.bench.result import provenance, report
from strata.cli import options
from strata.cli.bench.options import AsJson, LoadFormat, Model, Save

# In which a rank 0 that says nothing is taken for dead. It watches the others, and names one that stops after 10 s.
_ENGINE_TIMEOUT = 12
_MAX_MODEL_LEN = 1024


def faults(
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Each kills one rank, in turn, or stops one once all were killed: twice the ranks see both."
        ),
    ] = 20,
    model: Model = "0.6B",
    load_format: LoadFormat = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = "auto",
    tensor_parallel_size: options.TensorParallelSize = 2,
    enable_expert_parallel: options.EnableExpertParallel = False,
    request_rate: Annotated[float, typer.Option(min=0.1, help="Requests a second, of 64 tokens and 64 more.")] = 16.0,
    as_json: AsJson = False,
    save: Save = None,
) -> None:
    """Kill (SIGKILL) and stop (SIGSTOP) each rank of a server under load: how soon it is noticed and ready again.

    Exit code 1 if a request was lost without a word, a process or GPU memory was left over, or the server did not come
    back. Linux only.

    Example: strata bench faults --model 8B --tensor-parallel-size 2 --save faults.jsonl
    """
    from strata.bench.faults.rounds import FaultRound, FaultTest, run_rounds
    from strata.models.folder import BUILTIN_FOLDER
    from strata.models.shapes import SHAPES

    arguments = [
        model, "--dtype", dtype, "--device", device, "--tensor-parallel-size", str(tensor_parallel_size),
        "--engine-timeout", str(_ENGINE_TIMEOUT), "--restart-engine",
        # So that it starts soon: few sizes of steps are recorded.
        "--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", "32",
    ]  # fmt: skip
    if model in SHAPES:
        arguments += ["--tokenizer", str(BUILTIN_FOLDER)]
    arguments += ["--load-format", load_format or ("dummy" if model in SHAPES else "auto")]
    if enable_expert_parallel:
        arguments.append("--enable-expert-parallel")
    came_from = provenance()

    def show(one: FaultRound) -> None:
        report(one.values() | came_from, one.text(), as_json=as_json, save=save)

    found = run_rounds(FaultTest(arguments, tensor_parallel_size, rounds, request_rate), show)
    report(found.values() | came_from, found.text(), as_json=as_json, save=save)
    if found.wrong:
        raise typer.Exit(1)
