"""Snapshots in an object store, with a directory as the store."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_folder, verify_snapshot
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, RequestError
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest

_HOUR_S = 3600


def publish(path: Path, name: str, contents: dict[str, bytes], *, server_id: str = "s", seq: int = 3) -> Path:
    """Publish a snapshot of one shard with some files; return its directory."""
    files = SnapshotFiles(path)
    part = files.new_folder(name) / "shard-0000"
    part.mkdir(parents=True)
    for file_name, data in contents.items():
        (part / file_name).write_bytes(data)
    made = ShardPart(shard=0, server_id=server_id, seq=seq, epoch=1, step=2, tables=(), files=hash_folder(part))
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


def test_unchanged_files_are_not_sent_again(tmp_path: Path) -> None:
    """A later snapshot sends only what is new, whatever its files are called."""
    store = store_at(tmp_path / "bucket")
    store.upload(publish(tmp_path, "a", {"1.sst": b"one" * 1000}))
    assert store.upload(publish(tmp_path, "b", {"7.sst": b"one" * 1000, "8.sst": b"new"}, seq=4)) == 3


def test_a_prefix_belongs_to_one_server(tmp_path: Path) -> None:
    """A second server on a prefix is refused before it sends anything."""
    store = store_at(tmp_path / "bucket")
    store.upload(publish(tmp_path, "a", {"1.sst": b"one"}))
    before = objects_of(tmp_path / "bucket")
    with pytest.raises(ConfigError, match="another server: use another prefix for t"):
        store.upload(publish(tmp_path, "b", {"1.sst": b"two"}, server_id="t"))
    assert objects_of(tmp_path / "bucket") == before and store.names() == ["a"]


def test_a_name_is_given_once(tmp_path: Path) -> None:
    """Another snapshot of a name that the store has is refused, and the first one stays."""
    store = store_at(tmp_path / "bucket")
    store.upload(publish(tmp_path / "x", "a", {"1.sst": b"one"}))
    with pytest.raises(RequestError, match="another snapshot 'a' already"):
        store.upload(publish(tmp_path / "y", "a", {"1.sst": b"two"}))
    assert store.check("a") == verify_snapshot(tmp_path / "x" / "a")


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


def test_a_wrong_url_is_one_clear_line() -> None:
    """An unknown kind of store is refused with its URL."""
    with pytest.raises(ConfigError, match="ftp://x") as refused:
        SnapshotStore.of_url("ftp://x/y")
    assert "\n" not in str(refused.value)
