"""An S3 server in memory on loopback, with faults: slow, 503, reset, truncated, altered, and replies that are lost.

It has what `obstore` asks for: objects, ranges, conditional puts, uploads in parts, listings. It checks no signature.
"""

from __future__ import annotations

import dataclasses
import email.utils
import hashlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a fault is chosen by.

    Attributes:
        number: Of this request among all, from 1 on.
        method: GET, HEAD, PUT, POST or DELETE.
        key: Of the object, with the prefix; empty for a listing.
        query: Of the URL: `partNumber`, `uploads` and such.
        first_byte: Of the range that is asked for.
    """

    number: int
    method: str
    key: str
    query: dict[str, str]
    first_byte: int = 0


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


@dataclass
class _Stored:
    data: bytes
    put_s: float = field(default_factory=time.time)


class ObjectServer:
    """The server. `fault` is called for every request, in any thread; assign it to make things go wrong.

    Attributes:
        url: Of the bucket, with a prefix.
        environ: What a client needs in its environment.
        requests: All so far.
        sent_bytes: In bodies of puts that were done.
    """

    def __init__(self) -> None:
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        self.url = f"s3://{BUCKET}/prefix"
        self.requests: list[Request] = []
        self.sent_bytes = 0
        self.objects: dict[str, _Stored] = {}
        self._parts: dict[str, dict[int, bytes]] = {}
        self._lock, self._numbers, self._ended = threading.Lock(), itertools.count(1), threading.Event()
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def keys(self, prefix: str = "") -> list[str]:
        """Return the paths below the prefix, sorted."""
        start = f"prefix/{prefix}"
        with self._lock:
            return sorted(key.removeprefix("prefix/") for key in self.objects if key.startswith(start))

    def data_of(self, path: str) -> bytes:
        """Return the bytes of an object."""
        with self._lock:
            return self.objects[f"prefix/{path}"].data

    def age(self, hours: float, prefix: str = "files/") -> None:
        """Make objects look so old."""
        with self._lock:
            for key, stored in self.objects.items():
                if key.startswith(f"prefix/{prefix}"):
                    stored.put_s = time.time() - 3600 * hours

    def alter(self, path: str, data: bytes) -> None:
        """Put other bytes in place of an object's."""
        with self._lock:
            self.objects[f"prefix/{path}"].data = data

    def remove(self, path: str) -> None:
        """Remove an object."""
        with self._lock:
            del self.objects[f"prefix/{path}"]

    def answer(self, request: Request, body: bytes, headers: Mapping[str, str]) -> tuple[int, dict, bytes]:
        """Do what a request asks; return status, headers and body."""
        query, key, range_ = request.query, request.key, headers.get("Range", "")
        with self._lock:
            if copy_source := headers.get("x-amz-copy-source"):
                source = self.objects.get(unquote(copy_source).lstrip("/").removeprefix(f"{BUCKET}/"))
                if source is None:
                    return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
                self.objects[key] = _Stored(source.data)
                return 200, {}, f"<CopyObjectResult><ETag>{_etag(source.data)}</ETag></CopyObjectResult>".encode()
            if request.method == "PUT":
                self.sent_bytes += len(body)
                if "partNumber" in query:
                    self._parts[query["uploadId"]][int(query["partNumber"])] = body
                    return 200, {"ETag": _etag(body)}, b""
                if headers.get("If-None-Match") == "*" and key in self.objects:
                    return 412, {}, b""
                self.objects[key] = _Stored(body)
                return 200, {"ETag": _etag(body)}, b""
            if request.method == "POST":
                return self._post(key, query, body)
            if request.method == "DELETE":
                if "uploadId" in query:
                    self._parts.pop(query["uploadId"], None)
                else:
                    self.objects.pop(key, None)
                return 204, {}, b""
            if not key:
                return 200, {}, self._listing(query.get("prefix", ""))
            if (stored := self.objects.get(key)) is None:
                return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
            stored = dataclasses.replace(stored)
        found = {"ETag": _etag(stored.data), "Last-Modified": email.utils.formatdate(stored.put_s, usegmt=True)}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", range_)
        if match is None:
            return 200, found, stored.data
        first, last = int(match[1]), min(int(match[2]), len(stored.data) - 1)
        if first > last:
            return 416, found, b""
        found["Content-Range"] = f"bytes {first}-{last}/{len(stored.data)}"
        return 206, found, stored.data[first : last + 1]

    def _post(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, dict, bytes]:
        if "uploads" in query:
            upload = f"u{len(self._parts)}"
            self._parts[upload] = {}
            text = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            return 200, {}, f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode()
        if "uploadId" in query:
            parts = self._parts.pop(query["uploadId"], None)
            if parts is None:
                return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
            data = b"".join(parts[number] for number in sorted(parts))
            self.objects[key] = _Stored(data)
            text = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><ETag>{_etag(data)}</ETag>"
            return 200, {}, f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>".encode()
        if "delete" in query:
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for name in names:
                self.objects.pop(name, None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return 200, {}, f"<DeleteResult>{deleted}</DeleteResult>".encode()
        return 501, {}, b""

    def _listing(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.data)}</Size>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(stored.put_s))}</LastModified>"
            f"<ETag>{_etag(stored.data)}</ETag></Contents>"
            for key, stored in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()

    def begin(self, method: str, key: str, query: dict[str, str], first_byte: int) -> tuple[Request, Fault | None]:
        """Number a request and choose its fault."""
        request = Request(number=next(self._numbers), method=method, key=key, query=query, first_byte=first_byte)
        with self._lock:
            self.requests.append(request)
        fault = self.fault(request)
        if fault is not None and fault.delay_s:
            self._ended.wait(fault.delay_s)
        return request, fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that goes in the middle is what tests want."""


class _Handler(BaseHTTPRequestHandler):
    server_of: ObjectServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _do(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        range_ = self.headers.get("Range", "")
        match = re.match(r"bytes=(\d+)-", range_)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request, fault = self.server_of.begin(self.command, key, query, int(match[1]) if match else 0)
        fault = fault or Fault()
        if fault.resets:
            return self._hang_up()
        if fault.status:
            return self._reply(fault.status, {}, b"")
        status, headers, data = self.server_of.answer(request, body, self.headers)
        if fault.loses_reply:
            return self._hang_up()
        if fault.truncates:
            data = data[: len(data) // 2]
        if fault.alters and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        return self._reply(status, headers, data, cuts=fault.cuts)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do

    def _reply(self, status: int, headers: dict[str, str], data: bytes, *, cuts: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cuts else data)
        if cuts:
            self._hang_up()

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


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
