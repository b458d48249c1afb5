"""Checks on every request before the application receives it: host, origin, token, rate, size and time."""

import asyncio
import collections
import ipaddress
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

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
client: ContextVar[str] = ContextVar("client", default="")
"""The address that the request in hand came from."""
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
    """ASGI middleware: passes only valid requests to the application, each with its whole body.

    With `hosts`, only requests to these host names are answered, or with `numbers` also to an IP address: a page of
    another site can make its own name point here (DNS rebinding), but not a number. With a `token`, only requests that
    bring it are answered.
    """

    def __init__(
        self,
        app: App,
        *,
        hosts: Iterable[str] | None,
        rates: Rates,
        body_bytes: int,
        body_seconds: float,
        bodies_bytes: int,
        numbers: bool = False,
        token: str | None = None,
    ):
        self.app, self.rates = app, rates
        self.hosts = None if hosts is None else {host.lower() for host in hosts}
        self.numbers, self.token = numbers, token
        self.body_bytes, self.body_seconds, self.bodies_bytes = body_bytes, body_seconds, bodies_bytes
        self.held: collections.Counter[str] = collections.Counter()
        """Bytes of all bodies that are being read or processed, by address."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        own = address_of(scope["client"][0]) if scope.get("client") else ""
        client.set(own)
        headed, cookies = scope["method"] == "HEAD", []
        if headed:  # as GET, but without the body
            scope = {**scope, "method": "GET"}

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = (*HEADERS.items(), *(("set-cookie", cookie) for cookie in cookies))
                message["headers"] = [*message["headers"], *((a.encode(), b.encode()) for a, b in more)]
            elif headed:
                message["body"] = b""
            await send(message)

        chunks: list[bytes] = []
        try:
            self.check_sender(own, headers)
            cookies += self.check_token(scope, headers)
            await self.read(own, receive, chunks)
            body = b"".join(chunks)
            chunks[:] = [body]
            await self.app(scope, replay(body, receive), send_safely)
        except Refused as refused:
            await respond(send_safely, refused)
        finally:
            self.held[own] -= sum(map(len, chunks))
            if not self.held[own]:
                del self.held[own]
        return None

    def check_sender(self, own: str, headers: dict[str, str]) -> None:
        """Refuse other origins, other host names, and clients that exceed the rate limit."""
        host = headers.get("host", "")
        named = host_name(host)
        if self.hosts is not None and named not in self.hosts and not (self.numbers and is_number(named)):
            raise Refused(403, f"this server does not answer to the name {host[:100]!r}")
        origin = headers.get("origin")
        if origin is not None and origin_host(origin) != host.lower():
            raise Refused(403, "pages of other origins may not call this server")
        if not self.rates.admit(own):
            raise Refused(429, f"too many requests: {self.rates.rate:g} per second are answered")

    def check_token(self, scope: Message, headers: dict[str, str]) -> list[str]:
        """Refuse requests without the token; where it came in the address, return a cookie that keeps it."""
        if self.token is None:
            return []
        name = f"metaleo-{(scope.get('server') or ('', 0))[1]}"  # a cookie is for all ports of a host
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        kind, _, value = headers.get("authorization", "").partition(" ")
        try:
            kept = [one.value for one in [SimpleCookie(headers.get("cookie", "")).get(name)] if one is not None]
        except CookieError:
            kept = []
        given = [*asked, *kept, *([value.strip()] if kind.lower() == "bearer" else [])]
        if not any(secrets.compare_digest(one.encode(), self.token.encode()) for one in given):
            raise Refused(
                401, "this server needs its token: open the address that it printed, or send `Authorization: Bearer`"
            )
        return [f"{name}={self.token}; Path=/; HttpOnly; SameSite=Strict"] if asked else []

    async def read(self, own: str, receive: Receive, chunks: list[bytes]) -> None:
        """Read the whole body. If it is too large, read to its end and drop it, so that the client gets the error."""
        refused = None
        try:
            async with asyncio.timeout(self.body_seconds):
                more, size = True, 0
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "the connection was closed before the request was complete")
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    size += len(chunk)
                    if refused is None and size > self.body_bytes:
                        refused = Refused(413, f"a request may have {self.body_bytes:,} bytes, and this one has more")
                    elif refused is None and self.held.total() + len(chunk) > self.bodies_bytes:
                        refused = Refused(503, "too many large requests at once; try again in a moment")
                    elif refused is None and self.held[own] + len(chunk) > 3 * self.body_bytes:
                        refused = Refused(429, "too many large requests of yours at once; try again in a moment")
                    if refused is None:
                        chunks.append(chunk)
                        self.held[own] += len(chunk)
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
    headers += [(b"www-authenticate", b"Bearer")] if refused.status == 401 else []
    headers += [(b"connection", b"close")] if refused.status in (400, 408, 413, 429) else []
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


def address_of(host: str) -> str:
    """What stands for a client: its address, or the network of an IPv6 address, since one client may have all of it."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
    return host


def is_number(host: str) -> bool:
    """Whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
