"""Checks on every request before the application receives it: host, origin, rate limit, size and time limit."""

import asyncio
import collections
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Headers of every response: the page loads nothing from other origins, and no page may frame it."""
ADDRESSES = 10_000
"""Maximum clients whose rate is tracked; the least recently active client is evicted first."""


class Refused(Exception):
    """A request that is rejected before it reaches the application."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status, self.detail = status, detail


class Rates:
    """One token bucket per client: `burst` requests at once, `rate` per second in the long run."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic):
        self.rate, self.burst, self.clock = rate, burst, clock
        self.buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def admit(self, client: str) -> bool:
        now = self.clock()
        left, then = self.buckets.pop(client, (float(self.burst), now))
        left = min(self.burst, left + (now - then) * self.rate)
        admitted = left >= 1
        self.buckets[client] = (left - admitted, now)
        if len(self.buckets) > ADDRESSES:
            self.buckets.popitem(last=False)
        return admitted


class Guard:
    """ASGI middleware: passes only valid requests to the application, each with its whole body."""

    def __init__(
        self,
        app: App,
        *,
        hosts: Iterable[str] | None,
        rates: Rates,
        body_bytes: int,
        body_seconds: float,
        bodies_bytes: int,
    ):
        self.app, self.rates = app, rates
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.body_bytes, self.body_seconds, self.bodies_bytes = body_bytes, body_seconds, bodies_bytes
        self.held = 0
        """Bytes of all bodies that are being read or processed."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((a.encode(), b.encode()) for a, b in HEADERS.items())]
            await send(message)

        chunks: list[bytes] = []
        try:
            self.check_sender(scope, headers)
            await self.read(receive, chunks)
            body = b"".join(chunks)
            chunks[:] = [body]
            await self.app(scope, replay(body, receive), send_safely)
        except Refused as refused:
            await respond(send_safely, refused)
        finally:
            self.held -= sum(map(len, chunks))
        return None

    def check_sender(self, scope: Message, headers: dict[str, str]) -> None:
        """Refuse other origins, other host names (DNS rebinding), and clients that exceed the rate limit."""
        host = headers.get("host", "")
        if self.hosts is not None and host_name(host) not in self.hosts:
            raise Refused(403, f"this server does not answer to the name {host[:100]!r}")
        origin = headers.get("origin")
        if origin is not None and origin_host(origin) != host.lower():
            raise Refused(403, "pages of other origins may not call this server")
        client = scope["client"][0] if scope.get("client") else ""
        if not self.rates.admit(client):
            raise Refused(429, f"too many requests: {self.rates.rate:g} per second are answered")

    async def read(self, receive: Receive, chunks: list[bytes]) -> None:
        """Read the whole body. If it is too large, read to its end and drop it, so that the client gets the error."""
        refused = None
        try:
            async with asyncio.timeout(self.body_seconds):
                more, own = True, 0
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "the connection was closed before the request was complete")
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    own += len(chunk)
                    if refused is None and own > self.body_bytes:
                        refused = Refused(413, f"a request may have {self.body_bytes:,} bytes, and this one has more")
                    elif refused is None and self.held + len(chunk) > self.bodies_bytes:
                        refused = Refused(503, "too many large requests at once; try again in a moment")
                    if refused is None:
                        chunks.append(chunk)
                        self.held += len(chunk)
        except TimeoutError:
            refused = refused or Refused(408, f"the request did not arrive within {self.body_seconds:g} seconds")
        if refused is not None:
            raise refused


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body in one message, then all further messages."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


async def respond(send: Send, refused: Refused) -> None:
    body = json.dumps({"detail": refused.detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"retry-after", b"1")] if refused.status in (429, 503) else []
    headers += [(b"connection", b"close")] if refused.status in (400, 408, 413) else []
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def host_name(host: str) -> str:
    """The host without its port; an IPv6 address keeps its brackets."""
    host = host.lower()
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # brackets without a valid address
        return ""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
