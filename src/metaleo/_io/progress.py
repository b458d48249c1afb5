"""Progress of long work: the library reports it here, and the command line shows it."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Bar(Protocol):
    """Hears how much of some work is done."""

    def __call__(self, done: int | None = None, *, total: int | None = None, note: str | None = None) -> None: ...


class Progress:
    """Hears of messages and of work that goes on; this one stays silent."""

    def say(self, text: str) -> None:
        """A line for people."""

    @contextlib.contextmanager
    def bar(self, name: str, total: int | None = None, note: str = "") -> Iterator[Bar]:
        """Work of this name begins; what is yielded hears how far it is."""
        del name, total, note

        def ignore(done: int | None = None, *, total: int | None = None, note: str | None = None) -> None:
            del done, total, note

        yield ignore


SILENT = Progress()
