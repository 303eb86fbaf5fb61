"""The benches' object server with faults: slow, 503, reset, truncated, altered, and replies that are lost."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from headrace.scripts.benches import object_server as plain
from headrace.scripts.benches.object_server import PREFIX, StoreRequest


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a fault is chosen by.

    Attributes:
        number: Of this request among all, from 1 on.
        method: GET, HEAD, PUT, POST or DELETE.
        key: Of the object, with the prefix; empty for a listing.
        query: Of the URL: `partNumber`, `uploads` and such.
        first_byte: Of the range that is asked for.
        signed_content: What the signature says of the body: its SHA-256 in hex, or a word.
    """

    number: int
    method: str
    key: str
    query: dict[str, str]
    first_byte: int = 0
    signed_content: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one request.

    Attributes:
        status: Answer with this status and do nothing.
        delay_s: Wait so long first; the server's end ends the wait.
        resets: Close the connection and do nothing.
        loses_reply: Do it, then close the connection.
        cuts: Send half of the body, then close the connection.
        truncates: Send half of the body as if it were all.
        alters: Send the body with one bit changed.
    """

    status: int = 0
    delay_s: float = 0.0
    resets: bool = False
    loses_reply: bool = False
    cuts: bool = False
    truncates: bool = False
    alters: bool = False


class ObjectServer(plain.ObjectServer):
    """The server. `fault` is called for every request, in any thread; assign it to make things go wrong.

    Attributes:
        requests: All so far.
    """

    def __init__(self) -> None:
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        self.requests: list[Request] = []
        self._request_numbers, self._ended = itertools.count(1), threading.Event()
        super().__init__()

    def close(self) -> None:
        self._ended.set()
        super().close()

    def keys(self, prefix: str = "") -> list[str]:
        """Return the paths below the prefix, sorted."""
        start = f"{PREFIX}/{prefix}"
        with self._lock:
            return sorted(key.removeprefix(f"{PREFIX}/") for key in self.objects if key.startswith(start))

    def data_of(self, path: str) -> bytes:
        """Return the bytes of an object."""
        with self._lock:
            return self.objects[f"prefix/{path}"].data

    def age(self, hours: float, prefix: str = "files/") -> None:
        """Make objects look so old."""
        with self._lock:
            for key, stored in self.objects.items():
                if key.startswith(f"{PREFIX}/{prefix}"):
                    stored.put_s = time.time() - 3600 * hours

    def alter(self, path: str, data: bytes) -> None:
        """Put other bytes in place of an object's."""
        with self._lock:
            self.objects[f"{PREFIX}/{path}"].data = data

    def remove(self, path: str) -> None:
        """Remove an object."""
        with self._lock:
            del self.objects[f"{PREFIX}/{path}"]

    def respond(self, request: StoreRequest, connection: Any) -> None:
        fault = self._begin(request)
        if fault.resets:
            return connection.hang_up()
        if fault.status:
            return connection.reply(plain.Reply(fault.status))
        reply = self.answer(request)
        if fault.loses_reply:
            return connection.hang_up()
        body = bytes(reply.body)
        half = len(body) // 2
        if fault.truncates:
            body = body[:half]
        if fault.alters and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        connection.reply(replace(reply, body=body), sends_bytes=half if fault.cuts else None)
        if fault.cuts:
            connection.hang_up()

    def _begin(self, request: StoreRequest) -> Fault:
        """Number a request and choose its fault."""
        match = re.match(r"bytes=(\d+)-", request.headers.get("Range", ""))
        seen = Request(
            number=next(self._request_numbers),
            method=request.method,
            key=request.key,
            query=request.query,
            first_byte=int(match[1]) if match else 0,
            signed_content=request.headers.get("x-amz-content-sha256", ""),
        )
        with self._lock:
            self.requests.append(seen)
        fault = self.fault(seen) or Fault()
        if fault.delay_s:
            self._ended.wait(fault.delay_s)
        return fault


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Run a server while the block lasts."""
    server = ObjectServer()
    try:
        yield server
    finally:
        server.close()


def first(count: int, fault: Fault, matches: Callable[[Request], bool] = lambda _: True) -> Callable[..., Fault | None]:
    """Return a fault for the first so many requests that match."""
    left = itertools.count()
    return lambda request: fault if matches(request) and next(left) < count else None
