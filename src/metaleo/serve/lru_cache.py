"""Adapted tasks between requests: a bounded number of them, under names that nobody can guess."""

import collections
import secrets
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class CacheEntry(NamedTuple, Generic[Value]):
    """A kept value and what it weighs."""

    value: Value
    size: int


class LRUCache(Generic[Value]):
    """At most `most` values of at most `most_bytes` together; the least recently used goes first."""

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes, self.bytes = most, most_bytes, 0
        self.entries: collections.OrderedDict[str, CacheEntry[Value]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, value: Value, size: int) -> str:
        """Keep it, and say under which name. The newest stays, whatever it weighs."""
        name = secrets.token_urlsafe(16)
        self.entries[name] = CacheEntry(value, size)
        self.bytes += size
        while len(self) > 1 and (len(self) > self.most or self.bytes > self.most_bytes):
            _, gone = self.entries.popitem(last=False)
            self.bytes -= gone.size
        return name

    def get(self, name: str) -> Value | None:
        """What is kept under this name, if it still is."""
        if name not in self.entries:
            return None
        self.entries.move_to_end(name)
        return self.entries[name].value
