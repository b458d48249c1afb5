"""Exceptions."""

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """An argument or file cannot be used; the message says in one line what is wrong and why.

    Arguments are written as in Python, `way=20`; the command line shows them as flags, `--way 20`.

    Examples:
        >>> from metaleo import BadInput, load_data
        >>> try:
        ...     load_data("nowhere.npz")
        ... except BadInput as error:
        ...     print(str(error).split(";")[0])
        nowhere.npz does not exist
    """


class Interrupted(Exception):
    """The run received a stop signal and has saved its state."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> BadInput:
    """The error for a name that does not exist: the nearest one that does, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    asked = f": did you mean {near[0]}? Known are" if near else "; known are"
    return BadInput(f"unknown {kind} {name!r}{asked} {', '.join(names)}")


def require_at_least(least: float | int, **values: float | int) -> None:
    """Raise `BadInput` if a value is below `least`."""
    for name, value in values.items():
        if not value >= least:
            raise BadInput(f"{name}={value} must be at least {least}")


def require_between(least: float | int, most: float | int, **values: float | int) -> None:
    """Raise `BadInput` if a value is outside the range from `least` to `most`."""
    for name, value in values.items():
        if not least <= value <= most:
            raise BadInput(f"{name}={value} must be from {least:,} to {most:,}")
