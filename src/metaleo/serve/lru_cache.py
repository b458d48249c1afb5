"""An LRU cache that holds adapted tasks between requests, under names that cannot be guessed."""

import collections
import secrets
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class CacheEntry(NamedTuple, Generic[Value]):
    """A cached value and its size in bytes."""

    value: Value
    size: int


class LRUCache(Generic[Value]):
    """Holds at most `most` values of at most `most_bytes` in total; evicts the least recently used first."""

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes, self.bytes = most, most_bytes, 0
        self.entries: collections.OrderedDict[str, CacheEntry[Value]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, value: Value, size: int) -> str:
        """Store a value and return its name. The newest value is never evicted, whatever its size."""
        name = secrets.token_urlsafe(16)
        self.entries[name] = CacheEntry(value, size)
        self.bytes += size
        while len(self) > 1 and (len(self) > self.most or self.bytes > self.most_bytes):
            _, gone = self.entries.popitem(last=False)
            self.bytes -= gone.size
        return name

    def get(self, name: str) -> Value | None:
        """The value of this name, or None if it is not in the cache."""
        if name not in self.entries:
            return None
        self.entries.move_to_end(name)
        return self.entries[name].value
