"""A plain S3 server in memory on loopback: the object store of `headrace bench archive`, and of tests with faults.

It has what `obstore` asks for: objects, ranges, conditional puts, copies, uploads in parts, listings. It checks no
signature. Memory stands for the disks of another machine; its processor time is this machine's, as of any local server.
"""

from __future__ import annotations

import email.utils
import itertools
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from headrace.scripts.benches.child import Child, Worker

__all__ = ["BUCKET", "PREFIX", "ObjectServer", "Reply", "StoreProcess", "StoreRequest", "StoredBytes"]

BUCKET, PREFIX = "bucket", "prefix"
# Smaller objects say what the others are, so `keep_bytes` leaves them.
_LEAST_FORGOTTEN_BYTES = 1 << 20
# A bounded connection sends so much at once.
_PIECE_BYTES = 256 << 10
_NO_KEY = b"<Error><Code>NoSuchKey</Code></Error>"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRequest:
    """One request.

    Attributes:
        method: GET, HEAD, PUT, POST or DELETE.
        key: Of the object, with the prefix; empty for a listing.
        query: Of the URL: `partNumber`, `uploads` and such.
        headers: By name, any case.
        body: All of it.
    """

    method: str
    key: str
    query: dict[str, str]
    headers: Message[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""


_numbers = itertools.count(1)


@dataclass(slots=True)
class StoredBytes:
    """An object."""

    data: bytes
    put_s: float = field(default_factory=time.time)
    etag: str = field(default_factory=lambda: f'"{next(_numbers)}"')

    @property
    def headers(self) -> dict[str, str]:
        """What every answer says of it."""
        return {"ETag": self.etag, "Last-Modified": email.utils.formatdate(self.put_s, usegmt=True)}


class ObjectServer:
    """The server; it runs until `close`.

    Attributes:
        url: Of the bucket, with a prefix.
        port: Where it listens on 127.0.0.1.
        environ: What a client needs in its environment.
        sent_bytes: In bodies of puts that were done.
        objects: By key.
        connection_bytes_per_s: What each connection sends at most, as large stores bound it; 0 for no bound.

    Thread: any.
    """

    def __init__(self, *, keep_bytes: int | None = None) -> None:
        """Start; with `keep_bytes` the oldest large objects go when all of them take more."""
        self.url = f"s3://{BUCKET}/{PREFIX}"
        self.sent_bytes = 0
        self.objects: dict[str, StoredBytes] = {}
        self.connection_bytes_per_s = 0
        self._keep_bytes = keep_bytes
        self._parts: dict[str, dict[int, bytes]] = {}
        self._lock = threading.Lock()
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
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def respond(self, request: StoreRequest, connection: _Handler) -> None:
        """Answer a request on its connection; a test's server does something else here."""
        connection.reply(self.answer(request))

    def answer(self, request: StoreRequest) -> Reply:
        """Do what a request asks."""
        query, key, method = request.query, request.key, request.method
        with self._lock:
            if copy_source := request.headers.get("x-amz-copy-source"):
                return self._copy(unquote(copy_source).lstrip("/").removeprefix(f"{BUCKET}/"), key)
            if method == "PUT":
                return self._put(request)
            if method == "POST":
                return self._post(key, query, request.body)
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
        self.objects[key] = copy = StoredBytes(found.data)
        return Reply(200, body=f"<CopyObjectResult><ETag>{copy.etag}</ETag></CopyObjectResult>".encode())

    def _put(self, request: StoreRequest) -> Reply:
        query, key, body = request.query, request.key, request.body
        self.sent_bytes += len(body)
        if "partNumber" in query:
            self._parts[query["uploadId"]][int(query["partNumber"])] = body
            return Reply(200, {"ETag": f'"{next(_numbers)}"'})
        if request.headers.get("If-None-Match") == "*" and key in self.objects:
            return Reply(412)
        return Reply(200, {"ETag": self._store(key, body)})

    def _store(self, key: str, data: bytes) -> str:
        """Store an object; return its tag."""
        self.objects[key] = stored = StoredBytes(data)
        if self._keep_bytes is not None:
            large = {key: len(of.data) for key, of in self.objects.items() if len(of.data) >= _LEAST_FORGOTTEN_BYTES}
            too_many = sum(large.values()) - self._keep_bytes
            for oldest, size_bytes in large.items():
                if too_many <= 0:
                    break
                del self.objects[oldest]
                too_many -= size_bytes
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
        request = StoreRequest(
            method=self.command,
            key=unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/"),
            query={name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()},
            headers=self.headers,
            body=self.rfile.read(int(self.headers.get("Content-Length", 0))),
        )
        self.server_of.respond(request, self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do

    def reply(self, reply: Reply, *, sends_bytes: int | None = None) -> None:
        """Send an answer; of its body only the first `sends_bytes`, if they are given."""
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(reply.body if sends_bytes is None else reply.body[:sends_bytes])

    def _send(self, body: bytes | memoryview) -> None:
        bytes_per_s = self.server_of.connection_bytes_per_s
        if not bytes_per_s:
            self.wfile.write(body)
            return
        begin_s = time.monotonic()
        for start in range(0, len(body), _PIECE_BYTES):
            self.wfile.write(body[start : start + _PIECE_BYTES])
            time.sleep(max(0.0, begin_s + (start + _PIECE_BYTES) / bytes_per_s - time.monotonic()))

    def hang_up(self) -> None:
        """End the connection."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


class StoreProcess(Child):
    """The server in a process of its own; use it with `with`.

    Attributes:
        url, port, environ: As of `ObjectServer`.
    """

    def __init__(self, *, keep_bytes: int | None = None) -> None:
        """Start it; see `ObjectServer`."""
        super().__init__(f"{__name__}:_serve", "the bench's object server", keep_bytes=keep_bytes)
        self.url: str = self.ready["url"]
        self.port: int = self.ready["port"]
        self.environ: dict[str, str] = self.ready["environ"]

    @property
    def sent_bytes(self) -> int:
        """Bytes of the bodies that were put so far."""
        return int(self.ask()["sent_bytes"])

    def bound_connections(self, bytes_per_s: int) -> None:
        """Let each connection send so many bytes a second at most; 0 ends that."""
        self.ask(connection_bytes_per_s=bytes_per_s)

    def sizes(self, *folders: str) -> dict[str, int]:
        """Return the length of each object in some folders of the prefix, by key."""
        sizes: dict[str, int] = self.ask()["sizes"]
        starts = tuple(f"{PREFIX}/{folder}/" for folder in folders)
        return {key: size_bytes for key, size_bytes in sizes.items() if key.startswith(starts)}


@contextmanager
def _running(keep_bytes: int | None) -> Iterator[ObjectServer]:
    server = ObjectServer(keep_bytes=keep_bytes)
    try:
        yield server
    finally:
        server.close()


def _serve(keep_bytes: int | None) -> Worker:
    with _running(keep_bytes) as server:
        yield {"url": server.url, "port": server.port, "environ": server.environ}
        while True:
            sizes = {key: len(stored.data) for key, stored in list(server.objects.items())}
            order = yield {"sent_bytes": server.sent_bytes, "sizes": sizes}
            server.connection_bytes_per_s = order.get("connection_bytes_per_s", server.connection_bytes_per_s)
