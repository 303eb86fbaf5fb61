"""An object store under one prefix: S3, GCS, Azure, or a directory; `obstore` speaks their protocols.

One place for what everything in an object store needs: errors of ours, retries with a deadline, content names, reading
back what was sent, reading ahead in ranges, a bound on bandwidth, and the store's own clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import unquote

import numpy as np

from headrace.paramserver.system.direct_file import copy_bytes, page_memory
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, StorageError, UnavailableError

__all__ = [
    "Content",
    "ContentHash",
    "ObjectStore",
    "RateLimit",
    "StoreRefusesError",
    "StoredObject",
    "check_object_store_url",
]

_T = TypeVar("_T")

# An upload in parts has so many on their way.
_PART_BYTES, _PARTS_AT_ONCE = 5 << 20, 4
# A download reads ahead this far in each object, and in all objects of a store together has so many requests.
_RANGE_BYTES, _RANGES_AHEAD, _RANGES_AT_ONCE = 4 << 20, 3, 8
_CHUNK_BYTES = 256 << 10
_CONNECT_TIMEOUT_S = 10
_REQUEST_TIMEOUT_S = 60
_DEADLINE_S = 60.0
# `obstore` cannot be interrupted while it repeats a request.
_INNER_DEADLINE_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CLOCK = "clock"
_SCHEMES = ("s3://", "gs://", "az://", "file:///")
# What a store would say again about the same request; not 408 (time-out), 409 (conflict) and 429 (slow down).
_FINAL = re.compile(r"status code: (?:400|401|403|404|405|411|414|501)\b")


class StoreRefusesError(ConfigError):
    """The store answers and refuses us, or lacks the bucket: an operator has to act, there or here."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An entry of a listing: where, how long, and when it was put, by the store's clock."""

    path: str
    size_bytes: int
    put_at: datetime


@dataclass(frozen=True, slots=True)
class Content:
    """The length and SHA-256 of an object; names it, so that it is put once and can be checked by anyone."""

    size_bytes: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.size_bytes}-{self.sha256}"

    @classmethod
    def parse(cls, name: str) -> Content:
        """Return the content that `str` has written; `ValueError` if it is something else."""
        match = re.fullmatch(r"([0-9]{1,19})-([0-9a-f]{64})", name)
        if match is None:
            raise ValueError(f"{name!r} does not name a content")
        return cls(int(match[1]), match[2])


class ContentHash:
    """Computes the `Content` of bytes that come in pieces."""

    def __init__(self) -> None:
        self._sha, self._size_bytes = hashlib.sha256(), 0

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        self._sha.update(data)
        self._size_bytes += len(data)

    def content(self) -> Content:
        """Return the content of all bytes so far."""
        return Content(self._size_bytes, self._sha.hexdigest())


class RateLimit:
    """Bounds the bytes a second of all that share it, up and down; never more than a second's worth at once.

    Thread: any.
    """

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Allow so many bytes a second; 0 allows any number."""
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_s = 0.0  # when the bytes that were taken so far have passed
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may pass."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now_s = self._clock()
            start_s = max(self._free_s, now_s)
            self._free_s = start_s + num_bytes / self._bytes_per_s
        if start_s > now_s:
            self._sleep(start_s - now_s)


def check_object_store_url(url: str) -> None:
    """Raise `ConfigError` unless a URL has the form of an object store's, without user, password and query.

    The message does not repeat what may be a secret.
    """
    _, separator, rest = url.partition("://")
    place = unquote(rest.partition("/")[0] if separator else url)
    has_password = "@" in place or (":" in place and "@" in unquote(rest))  # a password may have a slash
    if has_password or "?" in url:  # obstore ignores queries
        raise ConfigError(
            f"the URL of an object store has a {'user or password' if has_password else 'query'}: everybody on this "
            "machine can read flags, and messages name the URL; write s3://BUCKET/PREFIX, and give secrets as "
            "environment variables, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (docs/snapshots.md)"
        )
    if not url.startswith(_SCHEMES):
        raise ConfigError(f"{url}: not a URL of an object store: s3://, gs://, az:// or file:///")


class ObjectStore:
    """The objects under one prefix of an object store; paths are relative to it, without a leading slash.

    Every method retries what may pass (no answer, 503, a reset) until a deadline. It raises `UnavailableError` if the
    store is still away then, `StoreRefusesError` if it refuses us, and `StorageError` if a directory that is the store
    fails.

    Memory: an `upload` holds at most 30 MiB, a `download` 20.

    Thread: any; everything blocks.

    Attributes:
        where: The URL, for messages.
    """

    def __init__(
        self, store: Any, where: str, *, rate: RateLimit | None = None, deadline_s: float = _DEADLINE_S
    ) -> None:
        """Use a store of `obstore`; `where` names it in errors. `of_url` makes one that retries requests itself."""
        self.where = where
        self._store, self._rate, self._deadline_s = store, rate or RateLimit(0), deadline_s
        self._closed = threading.Event()
        self._readers = ThreadPoolExecutor(_RANGES_AT_ONCE, "headrace-object-ranges")

    @classmethod
    def of_url(
        cls, url: str, *, rate: RateLimit | None = None, deadline_s: float = _DEADLINE_S, creates: bool = True
    ) -> Self:
        """Return the store at `s3://…`, `gs://…`, `az://…` or `file:///…`, with the environment's credentials.

        Args:
            url: Bucket and prefix.
            rate: Bounds the bytes a second, shared with other stores.
            deadline_s: How long to retry a request, seconds.
            creates: Make the directory that is the store; one who only reads does not.

        Raises:
            ConfigError: The URL is wrong.
        """
        check_object_store_url(url)
        if not creates and url.startswith("file:") and not Path(unquote(url.removeprefix("file://"))).is_dir():
            raise ConfigError(f"{url}: there is no such directory")
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        try:
            options: dict[str, Any] = {"mkdir": creates} if url.startswith("file:") else _http_options(deadline_s)
            if url.startswith("s3:") and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
                # A signature of the body is one more SHA-256 of all bytes, and what is large is read back.
                options["config"] = {"unsigned_payload": True}
            store = from_url(url, **options)
        except (BaseError, ValueError, OSError) as exc:
            raise ConfigError(f"{url}: {_line_of(exc)}") from exc
        return cls(store, url.rstrip("/"), rate=rate, deadline_s=deadline_s)

    @classmethod
    def at(cls, place: str, *, deadline_s: float = _DEADLINE_S) -> Self:
        """Return the store at a URL, or in a folder, which is made; errors are those of `of_url`."""
        return cls.of_url(place if "://" in place else Path(place).absolute().as_uri(), deadline_s=deadline_s)

    def share(self) -> Self:
        """Return the same store, with the same rate, that can be closed by itself."""
        return type(self)(self._store, self.where, rate=self._rate, deadline_s=self._deadline_s)

    def close(self) -> None:
        """End all repeating: what fails from now on fails at once. Thread: any. Idempotent."""
        self._closed.set()

    def get(self, path: str) -> bytes:
        """Return a small object; `GoneError` if there is none."""
        return self._retried(path, lambda: bytes(self._obstore().get(self._store, path).bytes()))

    def read_range(self, path: str, start: int, into: memoryview) -> None:
        """Fill memory with a part of an object, which must have it; `GoneError` if there is no such object."""

        def take(chunk: memoryview, at: int) -> None:
            copy_bytes(into[at : at + len(chunk)], chunk)

        self._read(path, start, len(into), take)

    def _read(self, path: str, start: int, size_bytes: int, take: Callable[[memoryview, int], None]) -> None:
        """Hand each piece of a part of an object to `take`, with its place in the part; again in a further attempt."""

        def read() -> None:
            at = 0
            found = self._obstore().get(self._store, path, options={"range": (start, start + size_bytes)})
            for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
                if at + len(chunk) <= size_bytes:
                    take(memoryview(chunk), at)
                at += len(chunk)
            if at != size_bytes:
                raise CorruptionError(f"{self.where}/{path}: {at} bytes instead of {size_bytes} from {start} on")

        self._rate.take(size_bytes)
        self._retried(path, read)

    def put(self, path: str, data: bytes) -> None:
        """Put a small object, in place of one that may be there."""
        self._rate.take(len(data))
        self._named(path, lambda: self._obstore().put(self._store, path, data, use_multipart=False))

    def create(self, path: str, data: bytes | memoryview) -> bool:
        """Put an object in one request unless there is one; return False then, which may be ours of a lost reply."""
        from obstore.exceptions import AlreadyExistsError

        def put() -> bool:
            try:
                self._obstore().put(self._store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        self._rate.take(len(data))
        return self._named(path, put)

    def put_if_absent(self, path: str, data: bytes) -> bytes:
        """Put a small object unless there is one; return what is there now, which may be our own of a lost reply."""
        return data if self.create(path, data) else self.get(path)

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose path begins with a folder's, such as `files/`, in any order."""
        return iter(self._named(prefix, lambda: list(self._listed(prefix))))

    def copy(self, source: str, target: str) -> datetime:
        """Copy an object inside the store, which costs us no bandwidth; return when the copy was put.

        Some stores give a copy the time of its source. `GoneError` if there is no such object.
        """

        def copy() -> datetime:
            self._obstore().copy(self._store, source, target)
            at: datetime = self._obstore().head(self._store, target)["last_modified"]
            return at.astimezone(UTC)

        return self._retried(source, copy)

    def delete(self, path: str) -> None:
        """Delete an object; harmless if it is not there."""

        def delete() -> None:
            with contextlib.suppress(FileNotFoundError):
                self._obstore().delete(self._store, path)

        self._retried(path, delete)

    def now(self) -> datetime:
        """Return the store's time: ages by our own clock would be wrong when it is."""

        def look() -> datetime:
            self._obstore().put(self._store, _CLOCK, b"", use_multipart=False)
            at: datetime = self._obstore().head(self._store, _CLOCK)["last_modified"]
            return at.astimezone(UTC)

        return self._named(_CLOCK, look)

    def upload(
        self,
        path: str,
        content: Content,
        read: Callable[[], Iterable[bytes | memoryview]],
        *,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Put an object of any length, and read it back.

        Args:
            path: Where; nothing else is ever put there.
            content: What `read` must yield.
            read: Called for each attempt; yields the bytes in pieces, which may be reused buffers.
            on_progress: Called with the bytes sent since its last call, again in a further attempt; may raise to stop.

        Raises:
            CorruptionError: `read` yields other bytes, or the store returns other bytes. The object must not be named.
        """

        def send() -> None:
            sent = ContentHash()

            def chunks() -> Iterator[bytes]:
                for piece in read():
                    # Small copies, for the same reason as in `pieces`.
                    for start in range(0, len(piece), _CHUNK_BYTES):
                        data = bytes(piece[start : start + _CHUNK_BYTES])
                        self._rate.take(len(data))
                        sent.update(data)
                        yield data
                        on_progress(len(data))

            if content.size_bytes <= _PART_BYTES:
                self._obstore().put(self._store, path, b"".join(chunks()), use_multipart=False)
            else:
                self._put_in_parts(path, chunks())
            if sent.content() != content:
                raise CorruptionError(f"{self.where}/{path}: what was read to send is not {content}")

        self._named(path, send)
        for _ in self.download(path, content):
            pass

    def download(self, path: str, content: Content) -> Iterator[memoryview]:
        """Yield an object's bytes in order, reading ahead; check them.

        Yields:
            Pieces of some megabytes, each overwritten later. They are known to be right only when the iterator ends.

        Raises:
            GoneError: There is no such object.
            CorruptionError: It is longer, shorter or altered.
        """
        got = ContentHash()
        for data in self.pieces(path, content.size_bytes):
            got.update(data)
            yield data
        if got.content() != content:
            raise CorruptionError(f"{self.where}/{path}: its {content.size_bytes} bytes are not those that were put")

    def pieces(self, path: str, size_bytes: int) -> Iterator[memoryview]:
        """Yield an object's bytes in order, reading ahead, for a caller that checks them.

        Each piece is overwritten later. Our own memory holds them: that of `obstore` is spread over all threads, and
        the allocator keeps it.

        Raises:
            GoneError: There is no such object.
            CorruptionError: It has another length.
        """
        if (found := self._size_of(path)) != size_bytes:
            raise CorruptionError(f"{self.where}/{path}: {found} bytes, and not the {size_bytes} that were put")
        starts, ahead = iter(range(0, size_bytes, _RANGE_BYTES)), deque[tuple[Future[None], memoryview]]()
        free: list[memoryview] = []

        def read_ahead() -> None:
            if (start := next(starts, None)) is not None:
                memory = free.pop() if free else page_memory(min(_RANGE_BYTES, size_bytes))
                memory = memory[: size_bytes - start]
                ahead.append((self._readers.submit(self.read_range, path, start, memory), memory))

        try:
            for _ in range(_RANGES_AHEAD):
                read_ahead()
            while ahead:
                reading, memory = ahead.popleft()
                reading.result()
                read_ahead()
                yield memory
                free.append(memory)
        finally:
            for reading, _ in ahead:
                reading.cancel()

    def has(self, path: str, data: memoryview) -> bool:
        """Return whether an object is there and has exactly these bytes, reading all of them."""

        def compare(start: int) -> None:
            wanted = data[start : start + _RANGE_BYTES]

            def take(chunk: memoryview, at: int) -> None:
                if not np.array_equal(
                    np.frombuffer(chunk, np.uint8), np.frombuffer(wanted[at : at + len(chunk)], np.uint8)
                ):
                    raise CorruptionError(f"{self.where}/{path}: other bytes than were put")

            self._read(path, start, len(wanted), take)

        try:
            if self._size_of(path) != len(data):
                return False
            for _ in self._readers.map(compare, range(0, len(data), _RANGE_BYTES)):
                pass
        except (CorruptionError, GoneError):
            return False
        return True

    def _size_of(self, path: str) -> int:
        return self._retried(path, lambda: int(self._obstore().head(self._store, path)["size"]))

    def is_whole(self, path: str, content: Content) -> bool:
        """Return whether an object is there and has its bytes, reading all of them."""
        try:
            for _ in self.download(path, content):
                pass
        except (CorruptionError, GoneError):
            return False
        return True

    def _put_in_parts(self, path: str, chunks: Iterator[bytes]) -> None:
        try:
            self._obstore().put(self._store, path, chunks, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
        except FileNotFoundError as exc:
            # The end of an upload whose first reply was lost finds no upload any more. Reading back tells.
            try:
                self._obstore().head(self._store, path)
            except FileNotFoundError:
                raise UnavailableError(f"{self.where}/{path}: the store has forgotten the upload in parts") from exc

    def _listed(self, prefix: str) -> Iterator[StoredObject]:
        for page in self._obstore().list(self._store, prefix):
            for found in page:
                yield StoredObject(found["path"], found["size"], found["last_modified"].astimezone(UTC))

    def _named(self, path: str, request: Callable[[], _T]) -> _T:
        """Return what a put or a listing returns; what is missing then is the bucket."""
        try:
            return self._retried(path, request)
        except GoneError as exc:
            raise StoreRefusesError(f"{self.where}: there is no such bucket") from exc

    def _retried(self, path: str, request: Callable[[], _T]) -> _T:
        """Return what a request returns, repeating it while the store is away.

        `obstore` repeats single requests for some seconds. This goes on until the deadline or `close`, also with what
        `obstore` may not repeat: a put with a condition, whose caller compares, and what breaks off in the middle.
        """
        deadline_s, pause_s = time.monotonic() + self._deadline_s, _FIRST_PAUSE_S
        while True:
            try:
                with self._mapped_errors(path):
                    return request()
            except UnavailableError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._closed.wait(min(pause_s * random.uniform(0.5, 1.0), left_s)):
                    raise
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @staticmethod
    def _obstore() -> Any:
        import obstore

        return obstore

    @contextlib.contextmanager
    def _mapped_errors(self, path: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except FileNotFoundError as exc:
            raise GoneError(f"{self.where}/{path}: there is no such object, or no such bucket") from exc
        except (PermissionDeniedError, UnauthenticatedError) as exc:
            raise StoreRefusesError(f"{self.where}/{path}: the store refuses us: {_line_of(exc)}") from exc
        except BaseError as exc:
            if _FINAL.search(str(exc)):
                raise StoreRefusesError(f"{self.where}/{path}: the store refuses us: {_line_of(exc)}") from exc
            raise UnavailableError(f"{self.where}/{path}: {_line_of(exc)}") from exc
        except OSError as exc:  # a directory that is the store
            raise StorageError(f"{self.where}/{path}: {_line_of(exc)}") from exc


def _http_options(deadline_s: float) -> dict[str, Any]:
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=_CONNECT_TIMEOUT_S),
        "timeout": timedelta(seconds=_REQUEST_TIMEOUT_S),
    }
    # Options given here replace those that obstore takes from the environment.
    if os.environ.get("AWS_ALLOW_HTTP", os.environ.get("ALLOW_HTTP", "")).lower() in ("1", "true", "yes", "on"):
        client["allow_http"] = True
    backoff = {
        "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
        "max_backoff": timedelta(seconds=_LONGEST_PAUSE_S),
        "base": 2,
    }
    retry = {
        "backoff": backoff,
        "max_retries": 20,
        "retry_timeout": timedelta(seconds=min(deadline_s, _INNER_DEADLINE_S)),
    }
    return {"client_options": client, "retry_config": retry}


def _line_of(exc: BaseException) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)
