"""Engines: fast computation on a batch of tasks, behind one interface.

Learners are written for one task. An engine computes many, and its results must equal those of `Reference`, which is
`jax.vmap` of the learner, up to rounding. Only the outer loop, evaluation and the estimators choose an engine.

More engines can be installed: a distribution declares them as entry points of the group `metaleo.engines`.
"""

import contextlib
import functools
from collections.abc import Iterator
from importlib.metadata import entry_points

from metaleo.engines.base import Engine as Engine
from metaleo.engines.closed_form import ClosedForm
from metaleo.engines.reference import Reference
from metaleo.errors import unknown_name
from metaleo.learners.base import Learner

GROUP = "metaleo.engines"
AUTO = "auto"
"""Selects the fastest engine that supports the computation."""


@functools.cache
def all_engines() -> dict[str, Engine]:
    """All engines by name, fastest first; each falls back on those after it."""
    installed = [point.load()() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]
    return {engine.name: engine for engine in (*installed, ClosedForm(), Reference())}


def choose_engine(learner: Learner, name: str = AUTO, runs: int = 1) -> Engine:
    """The engine of this name if it supports the learner in `runs` parallel runs, otherwise the next that does."""
    name = chosen if name == AUTO else name
    check_engine(name)
    names = list(all_engines())
    candidates = names if name == AUTO else names[names.index(name) :]
    return next(all_engines()[one] for one in candidates if all_engines()[one].supports(learner, runs))


def check_engine(name: str) -> None:
    if name not in (AUTO, *all_engines()):
        raise unknown_name("engine", name, (AUTO, *all_engines()))


chosen = AUTO


@contextlib.contextmanager
def use_engine(name: str) -> Iterator[None]:
    """Use this engine by default, instead of the fastest that supports the computation.

    Args:
        name: `auto`, `reference`, `closed-form`, or an engine of another distribution such as metaleo-kernels.

    Returns:
        A context manager.

    Examples:
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
