"""Wrong input on the command line: a usage error with the message that names the value and the cure, no traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

Value = TypeVar("Value")
MoreOptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Any other of the README's options, again for each: experts=fetched, expert_slots=8."
    ),
]


def checked(make: Callable[[], Value]) -> Value:
    """make(), with ValueError and OSError turned into usage errors."""
    try:
        return make()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def with_others(flags: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """others: `name=value`, the value as JSON, or as it stands where it is none. Raises ValueError for what is given
    twice, or without a value; names and values are for parse_options to judge."""
    options = dict(flags)
    for other in others:
        name, separator, text = other.partition("=")
        if not separator:
            raise ValueError(f"--option {other}: expected NAME=VALUE")
        if name in options:
            raise ValueError(f"--option {other}: {name} is given twice, the other time as {options[name]!r}")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options
