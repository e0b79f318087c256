"""Wrong input on the command line: a usage error with the message that names the value and the cure, no traceback."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import typer

Value = TypeVar("Value")


def checked(make: Callable[[], Value]) -> Value:
    """make(), with ValueError and OSError turned into usage errors."""
    try:
        return make()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
