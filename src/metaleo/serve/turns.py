"""Who may work when: few at a time, fairly among clients, and never with more memory than there is room for."""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from metaleo.serve.guard import Refused, client


@dataclasses.dataclass(eq=False)
class Wish:
    """Somebody who waits for a turn, or has it."""

    client: str
    size: int
    large: bool
    granted: asyncio.Future[None]


class Turns:
    """At most `slots` turns at once, whose sizes together are at most `most` bytes.

    The next is of the client with the fewest turns now, and among those of the one whose last turn was longest ago: a
    client with many requests delays its own. Large work leaves one slot to the rest, which thus never waits for it.
    """

    def __init__(self, slots: int, waiting: int, most: int):
        self.slots, self.most, self.places = slots, most, waiting
        self.waiting: list[Wish] = []
        self.running: list[Wish] = []
        self.last: collections.OrderedDict[str, None] = collections.OrderedDict()
        """Clients that wait or run, in the order of their last turns."""

    @contextlib.asynccontextmanager
    async def turn(self, size: int = 0, large: bool = False) -> AsyncIterator[None]:
        """Wait for a turn with `size` bytes; refuse if that can never be, or if too many wait already."""
        if size > self.most:
            raise Refused(413, f"this takes {size >> 20:,} MB of memory; a request may take {self.most >> 20:,} MB")
        own = client.get()
        if len(self.waiting) + len(self.running) >= self.places:
            raise Refused(503, "busy: too many requests are waiting; try again in a moment")
        if sum(wish.client == own for wish in self.waiting) >= max(2, self.places // 2):
            raise Refused(429, "too many of your requests are waiting; try again in a moment")
        wish = Wish(own, size, large, asyncio.get_running_loop().create_future())
        self.waiting.append(wish)
        self.last.setdefault(own)
        self.grant()
        try:
            await wish.granted
            yield
        finally:
            for place in (self.waiting, self.running):
                if wish in place:
                    place.remove(wish)
            if not any(other.client == own for other in (*self.waiting, *self.running)):
                self.last.pop(own, None)
            self.grant()

    def grant(self) -> None:
        """Give turns to those who may have one now."""
        while (wish := self.next()) is not None:
            self.waiting.remove(wish)
            self.running.append(wish)
            self.last.move_to_end(wish.client)
            if not wish.granted.done():  # else it was cancelled, and is about to leave
                wish.granted.set_result(None)

    def next(self) -> Wish | None:
        if len(self.running) >= self.slots:
            return None
        room = self.most - sum(wish.size for wish in self.running)
        large = sum(wish.large for wish in self.running) < max(1, self.slots - 1)
        now = collections.Counter(wish.client for wish in self.running)
        order = {name: place for place, name in enumerate(self.last)}
        able = [wish for wish in self.waiting if wish.size <= room and (large or not wish.large)]
        return min(able, key=lambda wish: (now[wish.client], order[wish.client]), default=None)
