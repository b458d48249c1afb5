"""Exceptions, and the checks that raise them."""


class BadInput(ValueError):
    """Something handed to Metaleo cannot be used; the message is one line that says what and why.

    Arguments are written as in Python, `way=20`; the command line shows them as flags, `--way 20`.
    """


class Interrupted(Exception):
    """The run was asked to stop, and has been saved."""


def require_at_least(least: int, **values: int | float) -> None:
    """Refuse arguments that are too small."""
    for name, value in values.items():
        if value < least:
            raise BadInput(f"{name}={value} must be at least {least}")
