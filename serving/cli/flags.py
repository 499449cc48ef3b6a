"""Groups of flags: a command takes dataclasses, and typer sees their fields.

@dataclass(frozen=True)
class Sampling:
    seed: Annotated[int, Option(help="Equal seeds give equal speech.")] = 0

@app.command()
@with_groups
def say(text: str, sampling: Sampling) -> int: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints


def with_groups(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command as typer should see it: each group of flags is replaced by its fields, in place."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += parameters_of(groups[parameter.name])
        else:
            annotation = hints[parameter.name]
            parameters.append(parameter.replace(annotation=annotation, kind=Parameter.KEYWORD_ONLY))

    @wraps(command)
    def run(**given: Any) -> int:
        filled = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **filled)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parameters_of(group: type) -> Iterator[Parameter]:
    """Yield a keyword parameter for each field of a group."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield Parameter(
            field.name, Parameter.KEYWORD_ONLY, default=default_of(field), annotation=hints[field.name]
        )


def default_of(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default
