"""Tasks that learners adapt to, and distributions over tasks."""

from collections.abc import Callable

from metaleo.tasks.episodes import Episodes as Episodes
from metaleo.tasks.sines_and_lines import SinesAndLines
from metaleo.tasks.task import Batch as Batch
from metaleo.tasks.task import Task as Task
from metaleo.tasks.task import Tasks as Tasks

PROBLEMS: dict[str, Callable[[int, int], Tasks]] = {"sines-and-lines": SinesAndLines}
"""Distributions over tasks that need no data, by name; each is called with shot and query."""
