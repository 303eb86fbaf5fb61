"""A plain S3 server in memory on loopback, with faults: slow, 503, reset, truncated, altered, replies that are lost.

It has what `obstore` asks for: objects, ranges, conditional puts, copies, uploads in parts, listings. It checks no
signature.
"""

from __future__ import annotations

import email.utils
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET, PREFIX = "bucket", "prefix"
_NO_KEY = b"<Error><Code>NoSuchKey</Code></Error>"
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, by which a fault is chosen.

    Attributes:
        number: Of this request among all, from 1 on.
        method: GET, HEAD, PUT, POST or DELETE.
        key: Of the object, with the prefix; empty for a listing.
        query: Of the URL: `partNumber`, `uploads` and such.
        headers: By name, any case.
    """

    number: int
    method: str
    key: str
    query: dict[str, str]
    headers: Message[str, str]

    @property
    def first_byte(self) -> int:
        """Of the range that is asked for."""
        match = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match else 0

    @property
    def signed_content(self) -> str:
        """What the signature says of the body: its SHA-256 in hex, or a word."""
        return self.headers.get("x-amz-content-sha256", "")


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


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""


@dataclass(slots=True)
class StoredObject:
    """An object."""

    data: bytes
    put_s: float = field(default_factory=time.time)
    etag: str = field(default_factory=lambda: f'"{next(_numbers)}"')

    @property
    def headers(self) -> dict[str, str]:
        """What every answer says of it."""
        return {"ETag": self.etag, "Last-Modified": email.utils.formatdate(self.put_s, usegmt=True)}


class ObjectServer:
    """The server; it runs until `close`. `fault` is called for every request, in any thread: assign what goes wrong.

    Attributes:
        url: Of the bucket, with a prefix.
        port: Where it listens on 127.0.0.1.
        environ: What a client needs in its environment.
        sent_bytes: In bodies of puts that were done.
        objects: By key.
        requests: All so far.

    Thread: any.
    """

    def __init__(self) -> None:
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        self.requests: list[Request] = []
        self.url = f"s3://{BUCKET}/{PREFIX}"
        self.sent_bytes = 0
        self.objects: dict[str, StoredObject] = {}
        self._parts: dict[str, dict[int, bytes]] = {}
        self._lock, self._ended, self._request_numbers = threading.Lock(), threading.Event(), itertools.count(1)
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self.environ = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        """Stop listening; replies that wait come at once."""
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def keys(self, prefix: str = "") -> list[str]:
        """Return the paths below the prefix, sorted."""
        start = f"{PREFIX}/{prefix}"
        with self._lock:
            return sorted(key.removeprefix(f"{PREFIX}/") for key in self.objects if key.startswith(start))

    def data_of(self, path: str) -> bytes:
        """Return the bytes of an object."""
        with self._lock:
            return self.objects[f"{PREFIX}/{path}"].data

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

    def respond(self, body: bytes, connection: _Handler, **facts: Any) -> None:
        """Answer a request on its connection, or do what its fault says."""
        request = Request(number=next(self._request_numbers), **facts)
        with self._lock:
            self.requests.append(request)
        fault = self.fault(request) or Fault()
        if fault.delay_s:
            self._ended.wait(fault.delay_s)
        if fault.resets:
            return connection.hang_up()
        if fault.status:
            return connection.reply(Reply(fault.status))
        reply = self._answer(request, body)
        if fault.loses_reply:
            return connection.hang_up()
        data = bytes(reply.body)
        half = len(data) // 2
        if fault.truncates:
            data = data[:half]
        if fault.alters and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        connection.reply(replace(reply, body=data), sends_bytes=half if fault.cuts else None)
        if fault.cuts:
            connection.hang_up()

    def _answer(self, request: Request, body: bytes) -> Reply:
        query, key, method = request.query, request.key, request.method
        with self._lock:
            if copy_source := request.headers.get("x-amz-copy-source"):
                return self._copy(unquote(copy_source).lstrip("/").removeprefix(f"{BUCKET}/"), key)
            if method == "PUT":
                return self._put(request, body)
            if method == "POST":
                return self._post(key, query, body)
            if method == "DELETE":
                if "uploadId" in query:
                    self._parts.pop(query["uploadId"], None)
                else:
                    self.objects.pop(key, None)
                return Reply(204)
            if not key:
                return Reply(200, body=self._listing(query.get("prefix", "")))
            stored = self.objects.get(key)
        if stored is None:
            return Reply(404, body=_NO_KEY)
        size_bytes = len(stored.data)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if match is None:
            return Reply(200, stored.headers, stored.data)
        first, last = int(match[1]), min(int(match[2]), size_bytes - 1)
        if first > last:
            return Reply(416, stored.headers)
        headers = stored.headers | {"Content-Range": f"bytes {first}-{last}/{size_bytes}"}
        return Reply(206, headers, memoryview(stored.data)[first : last + 1])

    def _copy(self, source: str, key: str) -> Reply:
        found = self.objects.get(source)
        if found is None:
            return Reply(404, body=_NO_KEY)
        self.objects[key] = copy = StoredObject(found.data)
        return Reply(200, body=f"<CopyObjectResult><ETag>{copy.etag}</ETag></CopyObjectResult>".encode())

    def _put(self, request: Request, body: bytes) -> Reply:
        query, key = request.query, request.key
        self.sent_bytes += len(body)
        if "partNumber" in query:
            self._parts[query["uploadId"]][int(query["partNumber"])] = body
            return Reply(200, {"ETag": f'"{next(_numbers)}"'})
        if request.headers.get("If-None-Match") == "*" and key in self.objects:
            return Reply(412)
        return Reply(200, {"ETag": self._store(key, body)})

    def _store(self, key: str, data: bytes) -> str:
        """Store an object; return its tag."""
        self.objects[key] = stored = StoredObject(data)
        return stored.etag

    def _post(self, key: str, query: dict[str, str], body: bytes) -> Reply:
        if "uploads" in query:
            upload = f"u{next(_numbers)}"
            self._parts[upload] = {}
            text = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            return Reply(200, body=f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode())
        if "uploadId" in query:
            parts = self._parts.pop(query["uploadId"], None)
            if parts is None:
                return Reply(404, body=b"<Error><Code>NoSuchUpload</Code></Error>")
            etag = self._store(key, b"".join(parts[number] for number in sorted(parts)))
            text = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><ETag>{etag}</ETag>"
            return Reply(200, body=f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>".encode())
        if "delete" in query:
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for name in names:
                self.objects.pop(name, None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return Reply(200, body=f"<DeleteResult>{deleted}</DeleteResult>".encode())
        return Reply(501)

    def _listing(self, prefix: str) -> bytes:
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.data)}</Size>"
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(stored.put_s))}</LastModified>"
            f"<ETag>{stored.etag}</ETag></Contents>"
            for key, stored in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients are killed amid requests."""


class _Handler(BaseHTTPRequestHandler):
    server_of: ObjectServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _do(self) -> None:
        url = urlsplit(self.path)
        self.server_of.respond(
            self.rfile.read(int(self.headers.get("Content-Length", 0))),
            self,
            method=self.command,
            key=unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/"),
            query={name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()},
            headers=self.headers,
        )

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do

    def reply(self, reply: Reply, *, sends_bytes: int | None = None) -> None:
        """Send an answer; of its body only the first `sends_bytes`, if they are given."""
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body if sends_bytes is None else reply.body[:sends_bytes])

    def hang_up(self) -> None:
        """End the connection."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


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
