"""How a command's `--help` is laid out."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """Leaves room for words beside the names of options on 80 columns.

    Without a column for what turns flags off, which is said of flags that are on, and without each option's environment
    variable, which a command that has them describes in its help.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "option":
                _make_narrow(parameter, ctx)
        super().format_help(ctx, formatter)


def _make_narrow(option: Any, ctx: Any) -> None:
    option.show_envvar = False
    if option.max is None:  # a column as wide as " [x>=1]" would cut the longest names
        option.min = None
    if option.is_flag:
        option.metavar, option.show_default = "", False
    else:
        kind = str(option.display_type_rich(ctx)).replace(" range", "")  # bounds stand beside it
        option.metavar = kind.replace("float", "num")
    if option.secondary_opts and option.default:
        option.help += f" On, unless {option.secondary_opts[0]} is given."
    option.secondary_opts = []
