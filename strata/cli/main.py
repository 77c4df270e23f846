"""The `strata` command: one sub-command a file."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from strata.cli.ending import ending

_HOMES = {
    "serve": "strata.cli.serve:command",
    "run-batch": "strata.cli.run_batch:run",
    "generate": "strata.cli.generate:generate",
    "chat": "strata.cli.chat:chat",
    "graph": "strata.cli.graph:graph",
    "train": "strata.cli.train:command",
    "data": "strata.cli.train_data:command",
    "bench": "strata.cli.bench:bench",
}


class _Commands(TyperGroup):
    """Imports a sub-command when it is asked for: a server has no use for what trains, and torch takes its time."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_HOMES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _HOMES:
            return None
        module, name = _HOMES[cmd_name].split(":")
        found = getattr(import_module(module), name)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False, rich_markup_mode="rich")
            found.command()(function)
        command = get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="strata", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


@app.callback()
def strata() -> None:
    """Pretrains, post-trains and serves large language models."""


def main() -> None:
    """Run the command; how it ends is in `ending`."""
    with ending():
        app()


if __name__ == "__main__":
    main()
