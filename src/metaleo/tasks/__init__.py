"""Meta-sets → problems: a task is a few labelled examples (support) and the examples to predict (query)."""

from metaleo.tasks.episodes import Episodes as Episodes
from metaleo.tasks.task import Batch as Batch
from metaleo.tasks.task import Task as Task
from metaleo.tasks.task import Tasks as Tasks
