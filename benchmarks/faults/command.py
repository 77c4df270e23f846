"""`strata bench faults`: a server over ranks loses one after the other under load, and must come back each time."""

from __future__ import annotations

from typing import Annotated

import typer

from strata.bench.result import provenance
from strata.bench.run import Setup
from strata.cli.bench.options import Report, setup_options
from strata.cli.groups import grouped

# In which a rank 0 that says nothing is taken for dead. It watches the others, and names one that stops after 10 s.
_ENGINE_TIMEOUT = 12
_MAX_MODEL_LEN = 1024


@grouped
def faults(
    *,
    rounds: Annotated[
        int,
        typer.Option(
            min=1, help="Each kills one rank, in turn, or stops one once all were killed: twice the ranks see both."
        ),
    ] = 20,
    setup: Annotated[
        Setup,
        setup_options(
            "model load_format dtype device tensor_parallel_size enable_expert_parallel", tensor_parallel_size=2
        ),
    ],
    request_rate: Annotated[float, typer.Option(min=0.1, help="Requests a second, of 64 tokens and 64 more.")] = 16.0,
    to: Report,
) -> None:
    """Kill (SIGKILL) and stop (SIGSTOP) each rank of a server under load: how soon it is noticed and ready again.

    Exit code 1 if a request was lost without a word, a process or GPU memory was left over, or the server did not come
    back. Linux only.

    Example: strata bench faults --model 8B --tensor-parallel-size 2 --save faults.jsonl
    """
    from benchmarks.faults.rounds import FaultRound, FaultTest, run_rounds
    from strata.models.folder import BUILTIN_FOLDER
    from strata.models.shapes import SHAPES

    model, ranks = setup.model, setup.tensor_parallel_size
    arguments = [
        model, "--dtype", setup.dtype, "--device", setup.device, "--tensor-parallel-size", str(ranks),
        "--engine-timeout", str(_ENGINE_TIMEOUT), "--restart-engine",
        # So that it starts soon: few sizes of steps are recorded.
        "--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", "32",
        "--load-format", setup.loads,
    ]  # fmt: skip
    if model in SHAPES:
        arguments += ["--tokenizer", str(BUILTIN_FOLDER)]
    if setup.enable_expert_parallel:
        arguments.append("--enable-expert-parallel")
    came_from = provenance()

    def show(one: FaultRound) -> None:
        to.report(one.values() | came_from, one.text())

    found = run_rounds(FaultTest(arguments, ranks, rounds, request_rate), show)
    to.report(found.values() | came_from, found.text())
    if found.wrong:
        raise typer.Exit(1)
