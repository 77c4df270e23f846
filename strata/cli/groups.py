"""Options that a class declares once, and that a command takes together, as one argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, get_type_hints

Values = dict[str, Any]


@dataclass(frozen=True)
class OptionGroup:
    """The options of a class, each an attribute: `name: Annotated[type, typer.Option(...)] = default`.

    names: those that are taken, between spaces, in the order of `--help`; all, if empty. make: gets the values of the
    options by name, and makes of them what the command gets. defaults: other ones than the class has.
    """

    declared: type
    names: str = ""
    make: Callable[..., Any] = dict
    defaults: Values = field(default_factory=dict)

    def parameters(self) -> Iterator[inspect.Parameter]:
        hints = get_type_hints(self.declared, include_extras=True)
        for name in self.names.split() or hints:
            default = self.defaults.get(name, getattr(self.declared, name, inspect.Parameter.empty))
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer reads it: in place of each parameter that is annotated with a `OptionGroup`, its options."""
    shown: list[inspect.Parameter] = []
    groups: dict[str, tuple[OptionGroup, list[inspect.Parameter]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group = next(
            (one for one in getattr(parameter.annotation, "__metadata__", ()) if isinstance(one, OptionGroup)), None
        )
        if group is None:
            shown.append(parameter)
        else:
            groups[parameter.name] = group, list(group.parameters())
            shown += groups[parameter.name][1]
    signature = inspect.Signature(shown)

    @wraps(command)
    def run(*args: Any, **given: Any) -> None:
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        values = bound.arguments
        for name, (group, options) in groups.items():
            taken = [(one, values.pop(one.name)) for one in options]
            values[name] = group.make(**{one.name: value for one, value in taken if _has_value(one)})
        command(**values)

    run.__annotations__ = {one.name: one.annotation for one in shown}
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _has_value(option: inspect.Parameter) -> bool:
    """Whether a command gets it: an old name is there to say the new one."""
    return bool(option.annotation.__metadata__[0].expose_value)
