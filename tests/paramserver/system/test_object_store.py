"""Objects under a prefix: put, read back, listed, retried, bounded; against a directory and a server with faults."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from object_server import Fault, ObjectServer, first, object_server

from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.system.object_store import Content, ContentHash, ObjectStore, RateLimit
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, UnavailableError

MIB = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(params=["directory", "server"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "directory":
        return ObjectStore.of_url(f"file://{tmp_path}/bucket/prefix")
    return ObjectStore.of_url(request.getfixturevalue("server").url)


def content_of(data: bytes) -> Content:
    return Content(len(data), hashlib.sha256(data).hexdigest())


def upload(store: ObjectStore, path: str, data: bytes, piece_bytes: int = MIB) -> None:
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    store.upload(path, content_of(data), lambda: pieces)


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hush@bucket/x",
        "s3://user:hu/sh@bucket/x",
        "http://hush@host/bucket",
        "s3:/user:hush@bucket",
        "user:hush@bucket",
        "s3://user%3Ahush%40bucket",
        "s3://user%3Ahu/sh%40bucket",
        "s3://bucket/x?secret_access_key=hush",
        "s3:/bucket/x?secret_access_key=hush",
    ],
)
def test_a_url_with_a_password_is_refused_and_not_repeated(url: str, tmp_path: Path) -> None:
    """Flags are seen by everybody on the machine, and messages name URLs: the error says where secrets go."""
    for refused in (lambda: ObjectStore.of_url(url), lambda: ServerConfig(data=tmp_path, object_store=url)):
        with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
            refused()
        assert "hu" not in str(caught.value) and "user:" not in str(caught.value)
    assert ObjectStore.of_url(f"file://{tmp_path}/a@b:c").where.endswith("/a@b:c")
    with pytest.raises(ConfigError, match="ftp://host/a"):  # nothing secret in it
        ObjectStore.of_url("ftp://host/a")


def test_objects_are_put_read_listed_and_deleted(store: ObjectStore) -> None:
    """What was put is read, whole and in part, and listed with length and the store's time."""
    before = store.now()
    assert abs((before - datetime.now(UTC)).total_seconds()) < 60
    store.put("files/a", b"one")
    store.put("files/a", b"three")
    part = bytearray(3)
    store.read_range("files/a", 1, memoryview(part))
    assert (store.get("files/a"), part) == (b"three", b"hre")
    store.put("other/b", b"")
    (found,) = store.list("files/")
    assert (found.path, found.size_bytes) == ("files/a", 5) and abs((found.put_at - before).total_seconds()) < 60
    store.delete("files/a")
    store.delete("files/a")
    assert list(store.list("files/")) == []
    with pytest.raises(GoneError, match="files/a"):
        store.get("files/a")
    assert store.put_if_absent("x", b"ours") == store.put_if_absent("x", b"theirs") == b"ours"
    with pytest.raises(CorruptionError, match="files/x"):  # a file that changes between its hash and its upload
        store.upload("files/x", content_of(b"one"), lambda: [b"two"])


@pytest.mark.parametrize("size_bytes", [0, 1, 8 * MIB, 21 * MIB + 7])
def test_an_upload_comes_back_as_it_was(store: ObjectStore, size_bytes: int) -> None:
    """Objects in one part and in many are read back, in order and checked."""
    data = hashlib.shake_256(b"x").digest(size_bytes)
    upload(store, "files/x", data)
    assert b"".join(map(bytes, store.download("files/x", content_of(data)))) == data
    assert store.is_whole("files/x", content_of(data))
    assert not store.is_whole("files/y", content_of(data))


@pytest.mark.parametrize("size_bytes", [0, 10, 9 * MIB + 7])
def test_what_was_put_is_compared(store: ObjectStore, size_bytes: int) -> None:
    """An object is put once, from any memory; it has the bytes that were put, and no others, in length and place."""
    data = memoryview(
        bytearray(hashlib.sha256(bytes([size_bytes % 251])).digest() * (size_bytes // 32 + 1))[:size_bytes]
    )
    assert store.create("archive/x", data)
    assert not store.create("archive/x", b"other")
    assert store.has("archive/x", data)
    others = [
        bytes(data) + b"x",
        bytes(data)[:-1] + b"?" if size_bytes else b"?",
        bytes(data)[1:] if size_bytes else b"?",
    ]
    assert not any(store.has("archive/x", memoryview(other)) for other in others)
    assert not store.has("archive/y", data)


def test_progress_may_stop_an_upload(store: ObjectStore) -> None:
    """An error of `on_progress` ends the upload, and nothing is there."""

    class _StoppedError(Exception):
        pass

    def stop(_: int) -> None:
        raise _StoppedError

    data = bytes(20 * MIB)
    with pytest.raises(_StoppedError):
        store.upload("files/x", content_of(data), lambda: [data[:MIB]] * 20, on_progress=stop)
    assert list(store.list("files/")) == []


@pytest.mark.parametrize(
    "fault", [Fault(status=503), Fault(status=429), Fault(status=500), Fault(resets=True), Fault(loses_reply=True)]
)
def test_what_may_pass_is_tried_again(server: ObjectServer, fault: Fault) -> None:
    """Each kind of request is repeated after a fault that may pass, and does what it should, once."""
    store = ObjectStore.of_url(server.url)
    for work in (
        lambda: store.put("a", b"data"),
        lambda: store.put_if_absent("b", b"data"),
        lambda: store.get("a"),
        lambda: store.read_range("a", 1, memoryview(bytearray(2))),
        lambda: list(store.list("")),
        lambda: upload(store, "c", bytes(9 * MIB)),
        lambda: list(store.download("c", content_of(bytes(9 * MIB)))),
        lambda: store.now(),
        lambda: store.delete("a"),
    ):
        server.fault = first(2, fault)
        work()
    assert server.keys() == ["b", "c", "clock"] and store.get("b") == b"data"


@pytest.mark.parametrize(
    "fault",
    [
        first(1, Fault(loses_reply=True), lambda request: request.method == "POST" and "uploadId" in request.query),
        first(3, Fault(cuts=True), lambda request: request.method == "GET"),
        lambda _: Fault(delay_s=0.05),
    ],
    ids=["its last reply is lost", "bodies break off", "slow"],
)
def test_an_upload_is_whole_and_sent_once(server: ObjectServer, fault: Callable[..., Fault | None]) -> None:
    """The end of an upload in parts is asked for again, a lost body costs only a request, a slow store awaited."""
    taken, data = [], bytes(range(256)) * 40_000

    class _Counted(RateLimit):
        def take(self, num_bytes: int) -> None:
            taken.append(num_bytes)

    server.fault, store = fault, ObjectStore.of_url(server.url, rate=_Counted(1))
    upload(store, "x", data)
    assert sum(taken) >= 2 * len(data), "bytes count against the rate both ways"
    assert b"".join(map(bytes, store.download("x", content_of(data)))) == data
    assert store.is_whole("x", content_of(data)) and server.sent_bytes == len(data)


@pytest.mark.parametrize("fault", [Fault(alters=True), Fault(truncates=True)])
def test_wrong_bytes_are_found(server: ObjectServer, fault: Fault) -> None:
    """An object that comes back altered or truncated is refused, when it is read back and when it is read."""
    store, data = ObjectStore.of_url(server.url), bytes(range(256)) * 30_000
    server.fault = first(1, fault, lambda request: request.method == "GET" and request.first_byte > 0)
    with pytest.raises((CorruptionError, UnavailableError)):
        ObjectStore.of_url(server.url, deadline_s=0.5).upload("x", content_of(data), lambda: [data])
    server.fault = lambda _: None
    server.alter("x", data[:-1])
    with pytest.raises(CorruptionError, match=r"x: 7679999 bytes"):
        list(store.download("x", content_of(data)))
    server.alter("x", data[:-1] + b"!")
    with pytest.raises(CorruptionError, match="not those that were put"):
        list(store.download("x", content_of(data)))


def test_a_store_that_stays_away_ends_in_one_line(server: ObjectServer) -> None:
    """After the deadline the error names the store and can be retried."""
    store = ObjectStore.of_url(server.url, deadline_s=0.3)
    server.fault = lambda _: Fault(status=503)
    for work in (lambda: store.put("x", b""), lambda: store.now(), lambda: list(store.list(""))):
        with pytest.raises(UnavailableError, match=server.url) as failed:
            work()
        assert "\n" not in str(failed.value) and failed.value.retriable


@pytest.mark.parametrize("wanted", [None, "true", "false"])
def test_bodies_are_signed_only_on_request(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, wanted: str | None
) -> None:
    """The signature leaves the body out, unless the environment wants it in."""
    if wanted is not None:
        monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", wanted)
    ObjectStore.of_url(server.url).create("a", b"data")
    (request,) = server.requests
    assert request.signed_content == (content_of(b"data").sha256 if wanted == "false" else "UNSIGNED-PAYLOAD")


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_store_that_refuses_us_is_not_asked_again(server: ObjectServer, status: int) -> None:
    """What would be refused again ends at once, as a mistake of the user's: a bucket that is missing too."""
    store = ObjectStore.of_url(server.url)
    server.fault = lambda _: Fault(status=status)
    works = [lambda: store.put_if_absent("x", b""), lambda: list(store.list("f/")), lambda: store.put("x", b"")]
    if status != 404:
        works += [lambda: store.get("x"), lambda: upload(store, "x", bytes(20 * MIB))]
    for work in works:
        server.requests.clear()
        with pytest.raises(ConfigError, match="bucket" if status == 404 else "refuses us"):
            work()
        assert len(server.requests) == 1


def test_memory_is_bounded_by_pieces_and_not_by_objects(server: ObjectServer) -> None:
    """A reader that stops in the middle has read ahead a few pieces, and no more."""
    store, data = ObjectStore.of_url(server.url), bytes(40 * MIB)
    upload(store, "x", data)
    server.requests.clear()
    reading = store.download("x", content_of(data))
    next(reading)
    reading.close()
    assert len([request for request in server.requests if request.method == "GET"]) <= 5


def test_the_rate_bounds_bytes_a_second() -> None:
    """Takers wait until the bytes before theirs have passed, and idle time gives no credit."""
    now_s, slept_s = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept_s.append(seconds)
        now_s += seconds

    rate = RateLimit(100, clock=lambda: now_s, sleep=sleep)
    for _ in range(3):
        rate.take(50)
    assert slept_s == [0.5, 0.5]
    now_s += 100
    rate.take(50)
    rate.take(50)
    assert slept_s == [0.5, 0.5, 0.5]
    RateLimit(0, sleep=sleep).take(1 << 40)
    assert len(slept_s) == 3


def test_a_content_name_is_read_back() -> None:
    """The name of a content tells it, and other words are refused, as are URLs of no object store."""
    hashed = ContentHash()
    hashed.update(b"a")
    hashed.update(memoryview(b"b"))
    assert hashed.content() == content_of(b"ab") == Content.parse(str(content_of(b"ab")))
    for name in ("", "2", "x-" + "0" * 64, "2-0", f"-2-{'0' * 64}"):
        with pytest.raises(ValueError, match="does not name"):
            Content.parse(name)
    for url in ("ftp://x/y", "s3:/x", "file://x", "/tmp", "s3://"):
        with pytest.raises(ConfigError, match=url) as refused:
            ObjectStore.of_url(url)
        assert "\n" not in str(refused.value)
