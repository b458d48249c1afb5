"""Progress of long operations: the library reports it here, and the command line displays it."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Bar(Protocol):
    """A callback that receives how much of an operation is done."""

    def __call__(self, done: int | None = None, *, total: int | None = None, note: str | None = None) -> None: ...


class Progress:
    """Receives messages and the progress of operations; this base class ignores them."""

    def say(self, text: str) -> None:
        """Report one line of text."""

    @contextlib.contextmanager
    def bar(self, name: str, total: int | None = None, note: str = "") -> Iterator[Bar]:
        """Begin an operation of this name; yields the callback for its progress."""
        del name, total, note

        def ignore(done: int | None = None, *, total: int | None = None, note: str | None = None) -> None:
            del done, total, note

        yield ignore


SILENT = Progress()
