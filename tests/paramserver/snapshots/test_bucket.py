"""Snapshots in an object store, with a directory as the store."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from object_server import Fault, ObjectServer, Request, object_server

from headrace.paramserver.log.claims import Claim
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_folder, verify_snapshot
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    RequestError,
    UnavailableError,
)
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest

_HOUR_S = 3600


def publish(
    path: Path, name: str, contents: dict[str, bytes], *, server_id: str = "s", seq: int = 3, term: int = 0
) -> Path:
    """Publish a snapshot of one shard with some files; return its directory."""
    files = SnapshotFiles(path)
    part = files.new_folder(name) / "shard-0000"
    part.mkdir(parents=True)
    for file_name, data in contents.items():
        (part / file_name).write_bytes(data)
    files_of = hash_folder(part)
    made = ShardPart(shard=0, server_id=server_id, seq=seq, epoch=1, step=2, tables=(), files=files_of, term=term)
    files.publish(SnapshotManifest(name=name, created_us=seq, parts=(made,)))
    return files.folder_of(name)


def store_at(path: Path) -> SnapshotStore:
    return SnapshotStore.of_url(f"file://{path}")


def objects_of(bucket: Path) -> set[str]:
    return {path.name for path in (bucket / "files").iterdir()}


def age(bucket: Path, hours: float) -> None:
    """Make all objects look older."""
    for path in (bucket / "files").iterdir():
        os.utime(path, (0, time.time() - hours * _HOUR_S))


def test_a_snapshot_goes_up_and_comes_back(tmp_path: Path) -> None:
    """A fetched snapshot equals the uploaded one, and a second upload of it sends nothing."""
    folder, bucket = publish(tmp_path / "own", "a", {"1.sst": bytes(300_000), "CURRENT": b"x"}), tmp_path / "bucket"
    store = store_at(bucket)
    assert store.upload(folder) == 300_001
    assert store.upload(folder) == 0
    assert store.names() == ["a"] and store.check("a") == verify_snapshot(folder)
    fetched = SnapshotFiles(tmp_path / "other")
    store.fetch("a", fetched)
    assert verify_snapshot(fetched.folder_of("a")) == verify_snapshot(folder)
    assert store.fetch("a", fetched) == verify_snapshot(folder)  # it is there
    publish(tmp_path / "third", "a", {"1.sst": b"x"})
    with pytest.raises(RequestError, match=r"another snapshot 'a' in .* already"):
        store.fetch("a", SnapshotFiles(tmp_path / "third"))
    # A later snapshot sends only what is new, whatever its files are called.
    assert store.upload(publish(tmp_path, "b", {"7.sst": bytes(300_000), "8.sst": b"new"}, seq=4)) == 3


def test_a_prefix_is_one_servers_and_a_name_is_given_once(tmp_path: Path) -> None:
    """A second server on a prefix sends nothing; another snapshot of a known name is refused; the first one stays."""
    store = store_at(tmp_path / "bucket")
    folder = publish(tmp_path, "a", {"1.sst": b"one"})
    store.upload(folder)
    before = objects_of(tmp_path / "bucket")
    with pytest.raises(ConfigError, match="another server: use another prefix for t"):
        store.upload(publish(tmp_path, "b", {"1.sst": b"two"}, server_id="t"))
    assert objects_of(tmp_path / "bucket") == before and store.names() == ["a"]
    with pytest.raises(RequestError, match="another snapshot 'a' already"):
        store.upload(publish(tmp_path / "y", "a", {"1.sst": b"two"}))
    assert store.check("a") == verify_snapshot(folder)


def test_a_snapshot_of_a_time_that_was_given_up_is_nobodys_choice(tmp_path: Path) -> None:
    """A snapshot from behind where a copy of a higher term began is void; the one before it is the newest."""
    store = store_at(tmp_path / "bucket")
    for seq, name in ((3, "before"), (9, "behind")):
        store.upload(publish(tmp_path, name, {"1.sst": name.encode()}, seq=seq, term=1))
    assert store.choose().name == "behind"
    claim = Claim(server_id="s", shard=0, term=2, nonce="n", owner="o", claimed_us=0, seq=5, mark=None)
    ObjectStore.of_url(f"file://{tmp_path / 'bucket'}").put(f"claims/0000/{2:016d}", claim.encode())
    newest = store.newest()
    assert newest is not None and newest.name == store.choose().name == "before"
    assert [[each.name for each in store.list(with_void=void)] for void in (False, True)] == [
        ["before"],
        ["before", "behind"],
    ]


@pytest.mark.parametrize("data", [b"two", b"on", b""])
def test_an_altered_object_is_found(tmp_path: Path, data: bytes) -> None:
    """A check and a fetch name an object with other bytes, and a fetch publishes nothing."""
    store, fetched = store_at(tmp_path / "bucket"), SnapshotFiles(tmp_path / "other")
    store.upload(publish(tmp_path, "a", {"1.sst": b"one"}))
    (object_path,) = (tmp_path / "bucket" / "files").iterdir()
    object_path.write_bytes(data)
    for read in (lambda: store.check("a"), lambda: store.fetch("a", fetched)):
        with pytest.raises(CorruptionError, match=object_path.name):
            read()
    assert fetched.list() == ([], [])


def test_what_a_killed_upload_left_is_checked_before_it_counts(tmp_path: Path) -> None:
    """An object that no snapshot names is read back, and sent again if it is damaged."""
    store, folder = store_at(tmp_path / "bucket"), publish(tmp_path, "a", {"1.sst": b"one"})
    store.upload(folder)
    store.remove("a")
    (object_path,) = (tmp_path / "bucket" / "files").iterdir()
    object_path.write_bytes(b"two")
    assert store.upload(folder) == 3
    assert store.check("a") == verify_snapshot(folder)


def test_a_damaged_local_file_is_not_uploaded(tmp_path: Path) -> None:
    """A file that differs from its manifest ends the upload, and no snapshot exists."""
    store, folder = store_at(tmp_path / "bucket"), publish(tmp_path, "a", {"1.sst": b"one"})
    (folder / "shard-0000" / "1.sst").write_bytes(b"two")
    with pytest.raises(CorruptionError, match=r"1\.sst"):
        store.upload(folder)
    assert store.names() == []


def test_prune_deletes_only_old_objects_without_a_snapshot(tmp_path: Path) -> None:
    """Objects of a removed snapshot go after a day, and those of another snapshot stay."""
    bucket = tmp_path / "bucket"
    store = store_at(bucket)
    store.upload(publish(tmp_path, "a", {"1.sst": b"one", "2.sst": b"two"}))
    store.upload(publish(tmp_path, "b", {"1.sst": b"one", "2.sst": b"new"}, seq=4))
    store.remove("a")
    store.remove("a")
    age(bucket, 23)
    assert store.prune() == 0
    age(bucket, 25)
    assert store.prune() == 1
    assert len(objects_of(bucket)) == 2 and store.check("b").name == "b"
    with pytest.raises(GoneError):
        store.manifest_of("a")


def test_an_upload_does_not_reuse_what_prune_may_delete(tmp_path: Path) -> None:
    """An object of more than half a day is sent again under a name that a running prune does not know."""
    bucket = tmp_path / "bucket"
    store, folder = store_at(bucket), publish(tmp_path, "a", {"1.sst": b"one"})
    store.upload(folder)
    (old,) = objects_of(bucket)
    store.remove("a")
    age(bucket, 13)
    assert store.upload(folder) == 3
    (bucket / "files" / old).unlink()
    assert store.check("a").name == "a"


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    """A manifest with a changed byte is named, and prune deletes nothing then."""
    bucket = tmp_path / "bucket"
    store = store_at(bucket)
    store.upload(publish(tmp_path, "a", {"1.sst": b"one"}))
    age(bucket, 25)
    path = bucket / "snapshots" / "a.json"
    path.write_bytes(path.read_bytes().replace(b'"crc32c": ', b'"crc32c": 1'))
    with pytest.raises(CorruptionError, match=r"a\.json"):
        store.prune()
    assert len(objects_of(bucket)) == 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


CONTENTS = {f"{number}.sst": bytes([number]) * 50_000 for number in range(6)} | {"CURRENT": b"x"}


def impatient(server: ObjectServer) -> SnapshotStore:
    return SnapshotStore(ObjectStore.of_url(server.url, deadline_s=0.01))


def after(count: int, fault: Fault) -> Callable[[Request], Fault | None]:
    """Return a fault for every request but the first so many."""
    seen = itertools.count()
    return lambda _: None if next(seen) < count else fault


@pytest.mark.parametrize("fault", [Fault(resets=True), Fault(loses_reply=True)], ids=["undone", "done"])
def test_an_upload_that_ends_at_any_request_can_be_repeated(tmp_path: Path, server: ObjectServer, fault: Fault) -> None:
    """Wherever it is killed, there is no snapshot or a whole one, and the next call makes it, after a prune too."""
    folder, ended = publish(tmp_path, "a", CONTENTS), 0
    for count in range(0, 40, 3):
        server.objects.clear()
        server.fault = after(count, fault)
        with contextlib.suppress(UnavailableError):
            impatient(server).upload(folder)
            ended += 1
        server.fault = lambda _: None
        store = SnapshotStore.of_url(server.url)
        assert store.names() in ([], ["a"])
        for name in store.names():
            store.check(name)
        store.prune()
        store.upload(folder)
        assert store.check("a") == verify_snapshot(folder)
    assert ended, "the last ones should have gone through"


def test_an_interrupted_fetch_goes_on(tmp_path: Path, server: ObjectServer) -> None:
    """A second call reads only what the first has not brought, and damage in what is there is replaced."""
    folder, store, files = (
        publish(tmp_path, "a", CONTENTS),
        SnapshotStore.of_url(server.url),
        SnapshotFiles(tmp_path / "b"),
    )
    store.upload(folder)
    server.fault = after(8, Fault(status=503))
    with pytest.raises(UnavailableError):
        impatient(server).fetch("a", files)
    assert files.list() == ([], [])
    there = [path for path in files.new_folder("a").rglob("*.sst") if path.stat().st_size]
    assert there
    there[0].write_bytes(there[0].read_bytes()[::-1][:-1] + b"!")
    server.fault = lambda _: None
    server.requests.clear()
    store.fetch("a", files)
    got = {request.key for request in server.requests if request.method == "GET" and "files/" in request.key}
    assert len(got) <= len(CONTENTS) - len(there) + 1
    assert verify_snapshot(files.folder_of("a")) == store.manifest_of("a")


def test_uploads_and_prunes_at_once_lose_nothing(tmp_path: Path, server: ObjectServer) -> None:
    """Shards that upload what they share, of any age, beside prunes and removals: every snapshot is whole."""
    store = SnapshotStore.of_url(server.url)
    folders = [publish(tmp_path / str(n), f"s{n}", CONTENTS | {"own.sst": bytes([n])}, seq=n) for n in range(1, 9)]
    for hours in (0, 13, 30):
        store.upload(folders[0])
        server.age(hours)
        store.remove("s1")
        with ThreadPoolExecutor(6) as pool:
            uploads = [pool.submit(SnapshotStore.of_url(server.url).upload, folder) for folder in folders[1:]]
            prunes = [pool.submit(SnapshotStore.of_url(server.url).prune) for _ in range(6)]
            for future in (*uploads, *prunes):
                future.result()
        store.prune()
        assert store.names() == [f"s{n}" for n in range(2, 9)]
        for name in store.names():
            store.check(name)
            store.remove(name)


def test_what_is_old_is_copied_inside_the_store(tmp_path: Path, server: ObjectServer) -> None:
    """An object of more than half a day is not sent again where the store can copy it."""
    store = SnapshotStore.of_url(server.url)
    store.upload(publish(tmp_path / "x", "a", CONTENTS))
    server.age(13)
    assert store.upload(publish(tmp_path / "y", "b", CONTENTS, seq=4)) == 0
    store.remove("a")
    server.age(13)
    store.prune()
    assert store.check("b").name == "b"


def test_a_manifest_of_objects_that_may_be_pruned_is_refused(
    tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that went up most of a day ago, or is gone, makes no snapshot; nor does a publisher that was paused."""
    store, folder = SnapshotStore.of_url(server.url), publish(tmp_path, "a", CONTENTS)
    manifest = verify_snapshot(folder)
    objects = store.upload_files(folder, manifest.files(), server_id="s")
    server.age(22.9)
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match="took too long: try again"):
        now, pauses = store._objects.now, iter([timedelta(0), timedelta(hours=2)])
        # It sleeps between its look and the manifest: a prune meanwhile saw no reason to spare the objects.
        patch.setattr(store._objects, "now", lambda: now() + next(pauses))
        store.publish(manifest, objects)
    server.age(23.5)
    with pytest.raises(UnavailableError, match="most of a day"):
        store.publish(manifest, objects)
    with pytest.raises(RequestError, match="not those of its files"):
        store.publish(manifest, {})
    objects = store.upload_files(folder, manifest.files(), server_id="s")
    server.remove(next(iter(objects.values())))
    with pytest.raises(UnavailableError):
        store.publish(manifest, objects)
    assert store.names() == []
