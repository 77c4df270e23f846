"""The `strata` command: one sub-command a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Annotated, Any

import typer

import strata
from strata.cli.ending import ending
from strata.cli.lazy import LazyCommands, lazy_group

_PLACES = {
    "serve": "strata.cli.serve:command",
    "run-batch": "strata.cli.run_batch:run",
    "generate": "strata.cli.generate:generate",
    "chat": "strata.cli.chat:chat",
    "graph": "strata.cli.graph:graph",
    "plan": "strata.cli.plan:plan",
    "simulate": "strata.cli.simulate:simulate",
    "warm": "strata.cli.warm:warm",
    "probe": "strata.cli.probe:probe",
    "explain": "strata.cli.explain:explain",
    "eval": "strata.cli.evaluation.command:evaluate",
    "train": "strata.cli.train:command",
    "data": "strata.cli.data.command:command",
    "quantize": "strata.cli.precision.quantize:quantize",
    "prune": "strata.cli.precision.prune:prune",
    "bench": "strata.cli.bench.inference:bench",
}
# Of the loop in which GNU's OpenMP looks for work, some 30 us: the next product of a step comes sooner. Its own 300,000
# keep cores busy that others wait for.
_SPINS = "10000"


def set_waiting(arguments: list[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait sleep soon, those of training at once, unless the environment says what they do.

    arguments: of the command line. Where training shares its cores with anything else, a small step takes many times as
    long if threads spin.
    """
    if "OMP_WAIT_POLICY" in environment:
        return
    if _trains(arguments):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)


def _trains(arguments: list[str]) -> bool:
    command, given = arguments[:1], arguments[1:]
    explains_a_run = any(one == "--run" or one.startswith("--run=") for one in given)
    return command == ["train"] or (command == ["explain"] and explains_a_run)


app = typer.Typer(
    name="strata",
    cls=lazy_group(_PLACES),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"strata {strata.__version__}")
        raise typer.Exit


@app.callback()
def start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Pretrains, post-trains and serves large language models."""


def options_of(arguments: Sequence[str]) -> list[str]:
    """Of the command that they name, as its function takes them."""
    commands: Mapping[str, Any] = LazyCommands(_PLACES)
    parameters: Sequence[Any] = ()
    for word in arguments:
        if word not in commands:
            break
        parameters, commands = commands[word].params, getattr(commands[word], "commands", {})
    return [one.name for one in parameters if one.param_type_name == "option"]


def main() -> None:
    """Run the command; how it ends is in `ending`."""
    set_waiting(sys.argv[1:])
    with ending(lambda: options_of(sys.argv[1:])):
        app()


if __name__ == "__main__":
    main()
