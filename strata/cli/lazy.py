"""Groups of commands that are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from strata.cli.help import Command


class LazyCommands(Mapping[str, Any]):
    """Imports a command when it is asked for: a server has no use for what trains, and torch takes its time.

    places: of each command by its name, "module:member".
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        module, member = self._places[name].split(":")
        found = getattr(import_module(module), member)
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False, rich_markup_mode="rich")
            found.command(cls=Command)(function)
        command = get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def lazy_group(places: Mapping[str, str]) -> type[TyperGroup]:
    """Of a Typer application with such commands."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: Any = LazyCommands(places)

    return LazyGroup
