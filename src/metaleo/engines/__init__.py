"""Speed, behind one seam: a batch of tasks.

Learners are written for one task. An engine takes many, and has one law: the numbers are those of `Reference`, which is
`jax.vmap` of the learner, to rounding. The outer loop, evaluation and the estimators ask for one; nobody else does.

Others can be installed: a distribution announces its engines as entry points of the group `metaleo.engines`.
"""

import contextlib
import functools
from collections.abc import Iterator
from importlib.metadata import entry_points

from metaleo.engines.base import Engine as Engine
from metaleo.engines.closed_form import ClosedForm
from metaleo.engines.reference import Reference
from metaleo.errors import BadInput
from metaleo.learners.base import Learner

GROUP = "metaleo.engines"
AUTO = "auto"
"""The fastest that supports what is to be computed."""


@functools.cache
def all_engines() -> dict[str, Engine]:
    """All engines by name, the fastest first; each of them falls back on those behind it."""
    installed = [point.load()() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]
    return {engine.name: engine for engine in (*installed, ClosedForm(), Reference())}


def choose_engine(learner: Learner, name: str = AUTO, runs: int = 1) -> Engine:
    """The engine of this name if it supports the learner, `runs` of them side by side, and else the next that does."""
    name = chosen if name == AUTO else name
    check_engine(name)
    names = list(all_engines())
    candidates = names if name == AUTO else names[names.index(name) :]
    return next(all_engines()[one] for one in candidates if all_engines()[one].supports(learner, runs))


def check_engine(name: str) -> None:
    if name not in (AUTO, *all_engines()):
        raise BadInput(f"unknown engine {name!r}; known are {', '.join((AUTO, *all_engines()))}")


chosen = AUTO


@contextlib.contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Compute with this engine wherever none is asked for by name, instead of the fastest that can.

    Args:
        name: `auto`, `reference`, `closed-form`, or an engine of another distribution such as metaleo-kernels.

    Returns:
        A context manager.

    Example:
        >>> from metaleo import LEOClassifier, use_engine
        >>> with use_engine("reference"):
        ...     classifier = LEOClassifier("cl2n").fit([[1.0, 0.0], [0.0, 1.0]], ["right", "up"])
    """
    global chosen
    check_engine(name)
    before, chosen = chosen, name
    try:
        yield
    finally:
        chosen = before
