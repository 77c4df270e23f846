"""`strata bench parallel`: the tests of serving on 1, 2, 4, 8 ranks, as many as there are, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from strata.bench.result import provenance, writable
from strata.cli import options
from strata.cli.groups import Values, grouped
from strata.text.counted import counted


@grouped
def parallel(
    *,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Most ranks: 1, 2, 4, ... up to these. All GPUs, or 2 processes on a CPU.")
    ] = None,
    models: Annotated[
        str, typer.Option(help="Between commas: shapes (random weights), folders, org/model, builtin.")
    ] = "0.6B,8B,70B,30B-A3B",
    tests: Annotated[
        str, typer.Option(help="Between commas: T0 (start), T1, T2, T3-bN, T4, and comm (messages alone).")
    ] = "comm,T2,T1,T4,T0",
    engine: Annotated[Values, options.engine("dtype", dtype="bfloat16")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each test but T0; the median counts.")] = 3,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which one measurement is given up.")] = 900.0,
    save: Annotated[
        Path, typer.Option(help="A JSON line as each measurement ends; what it has is not measured again.")
    ] = Path("bench_parallel.jsonl"),
) -> None:
    """Measure models on 1, 2, 4, 8 ranks: start, T1, T2, T4, messages; mixtures with whole experts on ranks, too.

    Each measurement is a process with a time limit. What does not fit is left out with a reason. An interrupted call
    is continued by the same call; figures of another commit are measured again.

    Example: strata bench parallel --ranks 8 --models 8B,70B
    """
    from benchmarks.parallel.measure import measure
    from benchmarks.parallel.plan import LeftOut, planned, require_tests, this_machine
    from benchmarks.parallel.record import append, measured, read
    from benchmarks.parallel.table import messages_table, tests_table, words
    from strata.bench.result import report_console
    from strata.models.config import DTYPES

    dtype = engine["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is unknown; known are {', '.join(DTYPES)}")
    asked = tests.split(",")
    require_tests(asked)
    machine = this_machine(device, ranks)
    found = list(planned(models.split(","), asked, ranks or machine.devices, machine, dtype))
    writable(save)
    commit = provenance()["commit"]
    done = measured(read(save), commit)
    wanted = []
    for one in found:
        if isinstance(one, LeftOut):
            typer.echo(one.text())
        else:
            wanted.append(one)
    if machine.by_default and asked != ["comm"] and all(one.model is None for one in wanted):
        raise ValueError("nothing of these models is measured here, as said above; give others by --models")
    left = [one for one in wanted if one not in done]
    if len(left) < len(wanted):
        typer.echo(f"{save} has {len(wanted) - len(left)} of {counted(len(wanted), 'measurement')}")
    failed = 0
    for number, one in enumerate(left, 1):
        record = measure(one, repeat, limit, commit)
        append(save, record)
        typer.echo(f"[{number} of {len(left)}] {words(record)}")
        if record.fault is None:
            done[one] = record
        failed += record.fault is not None
    console = report_console()
    shown = {one: done[one] for one in wanted if one in done}
    if any(one.model is not None for one in shown):
        console.print(tests_table(shown))
    if any(one.model is None for one in shown):
        console.print(messages_table(shown.values()))
    if failed:
        typer.echo(f"{failed} of {counted(len(wanted), 'measurement')} failed; the same call tries them again")
        raise typer.Exit(1)
