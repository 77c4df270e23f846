"""The `strata` command: one sub-command a file."""

from __future__ import annotations

import sys

import typer

from strata.cli.bench import bench
from strata.cli.chat import chat
from strata.cli.generate import generate
from strata.cli.graph import graph
from strata.cli.train import train
from strata.engine.faults import EngineFault

app = typer.Typer(
    name="strata",
    help="Pretrains, post-trains and serves large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(generate)
app.command()(chat)
app.command()(graph)
app.command()(train)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command; bad input or a fault of the engine is a message on standard error and exit code 1."""
    try:
        app()
    except (ValueError, EngineFault) as error:
        print(f"strata: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
