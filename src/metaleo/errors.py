"""Exceptions."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator

EXTRAS = {
    "serve": ("serving", ("fastapi", "pydantic", "uvicorn", "h11", "cachetools", "pyarrow")),
    "search": ("searching", ("optuna", "sqlalchemy")),
    "tables": ("reading .csv, .tsv and .parquet", ("pyarrow",)),
    "huggingface": ("reading a Hugging Face folder", ("datasets",)),
    "report": ("writing a report", ("jinja2",)),
    "onnx": ("exporting to ONNX", ("onnx", "onnxruntime")),
    "postgres": ("a PostgreSQL database", ("psycopg",)),
}
"""Extras of pyproject.toml: what needs them, and the modules that they install."""


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


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Where a module of an extra is imported: if it is not installed, say in one line how to install it.

    Other modules that are missing remain what they are, an error.
    """
    what, modules = EXTRAS[extra]
    try:
        yield
    except ImportError as error:
        missing = error.__cause__ or error  # Optuna hides a missing driver behind an error of its own
        name = (missing.name or "").split(".")[0] if isinstance(missing, ModuleNotFoundError) else None
        if name not in modules:
            raise
        raise BadInput(f"{what} needs {name}, which is not installed: pip install 'metaleo[{extra}]'") from error


def unknown_name(kind: str, name: str, known: Iterable[str]) -> BadInput:
    """The error for a name that does not exist: the nearest one that does, and all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    asked = f": did you mean {near[0]}? Known are" if near else "; known are"
    return BadInput(f"unknown {kind} {name!r}{asked} {', '.join(names)}")


def one_line(error: Exception) -> str:
    """What an exception of other code says, in one line of at most 200 characters, for a message of ours."""
    return " ".join(str(error).split())[:200] or type(error).__name__


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


def require_seed(seed: int, seeds: int = 1) -> None:
    """Raise `BadInput` for a seed that JAX's keys cannot tell from another; of several, this is the first."""
    require_between(0, 2**32 - seeds, seed=seed)
