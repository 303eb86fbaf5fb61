"""Publishing, checking and removing snapshots in a directory."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import pytest

from headrace.paramserver.snapshots import directory
from headrace.paramserver.snapshots.directory import SnapshotFiles, check_file, hash_folder, verify_snapshot
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, RequestError, StorageError
from headrace.schemas.snapshot_manifest import MANIFEST_NAME, ShardPart, SnapshotManifest


@pytest.fixture
def files(tmp_path: Path) -> SnapshotFiles:
    return SnapshotFiles(tmp_path)


def make(
    files: SnapshotFiles, name: str, *, created_us: int = 1, seq: int = 3, server_id: str = "s"
) -> SnapshotManifest:
    """Make a snapshot of two shards with two files each, unpublished."""
    parts = []
    for shard in range(2):
        folder = files.new_folder(name) / f"shard-{shard:04d}"
        folder.mkdir(parents=True)
        (folder / "CURRENT").write_bytes(b"x" * 16)
        (folder / "000001.sst").write_bytes(bytes(range(256)) * 100)
        hashed = hash_folder(folder)
        parts.append(ShardPart(shard=shard, server_id=server_id, seq=seq, epoch=1, step=2, tables=(), files=hashed))
    return SnapshotManifest(name=name, created_us=created_us, parts=tuple(parts))


def note_syncs(monkeypatch: pytest.MonkeyPatch, target: Path) -> list[tuple[Path, bool]]:
    """Return a list that receives the path of each sync, and whether `target` existed by then."""
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")), target.exists()))
    )
    return synced


def test_published_snapshots_are_listed_and_read(tmp_path: Path) -> None:
    """A snapshot is listed and readable only once it is published."""
    files = SnapshotFiles(tmp_path / "snapshots")
    assert files.list() == ([], []) and files.newest() is None
    late, early = make(files, "a", created_us=2), make(files, "b", created_us=1)
    assert files.list() == ([], [])
    files.publish(late)
    files.publish(early)
    assert files.list() == ([early, late], []) and files.newest() == late
    assert verify_snapshot(files.folder_of("a")) == late
    assert files.read("a", "shard-0001/000001.sst", 250, 10) == (
        bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3]),
        25600,
    )
    assert SnapshotManifest.decode(files.read("a", "", 0, 1 << 20)[0]) == late
    assert files.read("a", "", 0, 10)[0] == late.encode()[:10]
    (tmp_path / "snapshots" / "going").mkdir()  # like a snapshot that is removed while it is listed
    assert files.list() == ([early, late], [])


def test_snapshots_are_in_the_order_of_the_log(tmp_path: Path) -> None:
    """Clocks order only stores; snapshots of one store are ordered by seq."""
    files = SnapshotFiles(tmp_path / "snapshots")
    made = [("a", 3, 9, "s"), ("b", 5, 2, "s"), ("c", 4, 7, "s"), ("d", 90, 8, "t"), ("e", 91, 1, "t")]
    for name, seq, created_us, server_id in made:
        files.publish(make(files, name, seq=seq, created_us=created_us, server_id=server_id))
    assert [manifest.name for manifest in files.list()[0]] == ["d", "e", "a", "c", "b"]
    newest = [files.newest(server_id) for server_id in ("s", "t", None)]
    assert [manifest and manifest.name for manifest in newest] == ["b", "e", "b"]
    assert files.newest("another") is None


def test_a_part_is_durable_once_it_is_hashed(files: SnapshotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing syncs the files, their names and the folder's name; publishing does not sync them again."""
    synced: list[Path] = []
    monkeypatch.setattr(directory, "fsync_path", synced.append)
    make(files, "a")
    folders = [files.new_folder("a") / f"shard-{shard:04d}" for shard in range(2)]
    assert synced == [path for f in folders for path in (f / "000001.sst", f / "CURRENT", f, f.parent)]


def test_publishing_syncs_every_name_of_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifest and folder are synced before the rename, and the directories above after it."""
    files = SnapshotFiles(tmp_path / "snapshots")
    manifest = make(files, "a")
    synced = note_syncs(monkeypatch, files.folder_of("a"))
    files.publish(manifest)
    assert [(path.name, is_published) for path, is_published in synced] == [
        *(("manifest.json.tmp", False), (".new-a", False)),
        *(("snapshots", True), (tmp_path.name, True)),
    ]


def test_only_files_of_the_manifest_are_read(tmp_path: Path) -> None:
    """A path outside the manifest is not served."""
    files = SnapshotFiles(tmp_path / "snapshots")
    files.publish(make(files, "a"))
    (tmp_path / "secret").write_text("no")
    for path in ("../../secret", "shard-0000/../../../secret", "shard-0000", str(tmp_path / "secret")):
        with pytest.raises(GoneError):
            files.read("a", path, 0, 10)
    with pytest.raises(RequestError):
        files.read("../snapshots/a", "", 0, 10)


def test_a_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of pieces of a fetch, and repeated listings, decode a manifest once."""
    files, decoded = SnapshotFiles(tmp_path), []
    for name, seq in (("a", 1), ("b", 2)):
        files.publish(make(files, name, seq=seq))
    decode = SnapshotManifest.decode
    monkeypatch.setattr(SnapshotManifest, "decode", lambda data: (decoded.append(1), decode(data))[1])
    for _ in range(3):
        assert files.read("a", "shard-0000/CURRENT", 0, 100)
        assert (newest := files.newest()) is not None and newest.name == "b"
    assert len(decoded) == 2
    files.remove("b")
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # another snapshot of that name
    (tmp_path / "b" / MANIFEST_NAME).write_bytes(make(files, "b", seq=9).encode())
    assert (newest := files.newest()) is not None and newest.parts[0].seq == 9
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(GoneError):
        files.read("b", "shard-0000/CURRENT", 0, 100)
    assert files._read_manifests.keys() == {"a"}


@pytest.mark.parametrize("damage", ["flip", "truncation", "missing", "manifest"])
def test_damage_is_found_and_named(files: SnapshotFiles, damage: str) -> None:
    """A flipped bit, a truncated or missing file and a changed manifest are errors that name the file."""
    files.publish(make(files, "a"))
    path = files.folder_of("a") / ("manifest.json" if damage == "manifest" else "shard-0001/000001.sst")
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "truncation":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"a/manifest\.json: " if damage == "manifest" else "000001.sst"):
        verify_snapshot(files.folder_of("a"))
    assert len(files.list()[1]) == (damage == "manifest")


def test_damage_between_two_snapshots_is_found(files: SnapshotFiles) -> None:
    """A file that two snapshots share keeps its first checksum, so later damage shows."""
    files.publish(make(files, "a"))
    shared = files.folder_of("a") / "shard-0000" / "000001.sst"
    folder = files.new_folder("b") / "shard-0000"
    folder.mkdir(parents=True)
    os.link(shared, folder / "000002.sst")
    (folder / "000003.sst").write_bytes(shared.read_bytes())
    with shared.open("r+b") as file:
        file.write(b"!")
    linked, copied = hash_folder(folder, known=files.row_files_of_newest("s"))
    assert linked.name == "000002.sst" and linked.crc32c == copied.crc32c
    with pytest.raises(CorruptionError, match=r"000002\.sst: its checksum"):
        check_file(folder / linked.name, linked)
    check_file(folder / copied.name, copied)
    assert files.row_files_of_newest("another store") == {}
    shared.unlink()  # the snapshot is being removed: its other files are known
    assert [file.crc32c for file in files.row_files_of_newest("s").values()] == [linked.crc32c]


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_incomplete_snapshot_is_not_published(files: SnapshotFiles, is_missing: bool) -> None:
    """A missing or short file and a taken name are refused."""
    manifest = make(files, "a")
    path = files.new_folder("a") / "shard-0000" / "CURRENT"
    if is_missing:
        path.unlink()
    else:
        os.truncate(path, 15)
    with pytest.raises(CorruptionError, match="CURRENT"):
        files.publish(manifest)
    assert files.list() == ([], [])
    files.discard("a")
    files.publish(make(files, "a"))
    with pytest.raises(RequestError, match="already"):
        files.publish(make(files, "a"))


def test_a_name_goes_before_its_files(files: SnapshotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removed name is durable before files go; remains of an interrupted removal do not matter."""
    (tmp_path / ".gone-a" / "shard-0000").mkdir(parents=True)
    files.publish(make(files, "a"))
    synced = note_syncs(monkeypatch, tmp_path / ".gone-a" / "manifest.json")
    files.remove("a")
    assert synced == [(tmp_path, True)]
    assert list(tmp_path.iterdir()) == []


def test_removed_snapshots_are_gone(files: SnapshotFiles, tmp_path: Path) -> None:
    """A removed snapshot, or an interrupted removal, leaves nothing."""
    files.publish(make(files, "a"))
    files.remove("a")
    with pytest.raises(GoneError):
        files.read("a", "", 0, 1)
    with pytest.raises(GoneError):
        files.remove("a")
    (tmp_path / ".gone-b").mkdir()
    make(files, "c")
    files.prune_abandoned()
    assert [path.name for path in tmp_path.iterdir()] == [".new-c"]  # too young to be abandoned
    files.publish(make(files, "d"))
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    files.prune_abandoned()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    with pytest.raises(ConfigError):
        verify_snapshot(tmp_path / "nothing")


def test_a_fetch_of_days_is_not_pruned(files: SnapshotFiles, tmp_path: Path) -> None:
    """An attempt with a recently written file is active, however old its folders are."""
    make(files, "a")
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    with open(files.new_folder("a") / "shard-0001" / "000001.sst", "ab") as file:
        file.write(b"more")
    files.prune_abandoned()
    assert files.new_folder("a").is_dir()


def test_an_unread_snapshot_is_removed_when_its_lease_ends(files: SnapshotFiles, tmp_path: Path) -> None:
    """Reading renews a lease; a snapshot with a lease is never the newest; others stay."""
    stays = make(files, "stays", seq=1)
    files.publish(stays)
    for name in ("left", "read"):
        files.publish(dataclasses.replace(make(files, name), lease_s=60))
    assert files.prune_abandoned() == ()
    assert files.newest() == stays
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    files.read("read", "shard-0000/CURRENT", 0, 1)
    assert files.prune_abandoned() == ("left",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["read", "stays"]


def test_a_failed_disk_while_pruning_is_a_storage_error(
    files: SnapshotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An age that cannot be read is a storage error."""
    files.publish(dataclasses.replace(make(files, "left"), lease_s=60))

    def fail(path: Path) -> float:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(directory, "_idle_s", fail)
    with pytest.raises(StorageError, match=f"{tmp_path}: Input/output error"):
        files.prune_abandoned()


def test_a_removal_and_pruning_may_meet(files: SnapshotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal succeeds even if pruning removes the files first."""
    files.publish(make(files, "a"))
    remove_tree = shutil.rmtree

    def prune_first(path: Path, **settings: bool) -> None:
        if not settings:
            files.prune_abandoned()
        remove_tree(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", prune_first)
    files.remove("a")
    assert list(tmp_path.iterdir()) == []


def test_parts_of_two_attempts_make_no_snapshot(files: SnapshotFiles) -> None:
    """Files of another attempt with the right names and lengths are not published."""
    manifest = make(files, "a")
    (files.new_folder("a") / "shard-0001" / "CURRENT").write_bytes(b"y" * 16)
    with pytest.raises(CorruptionError, match="shard-0001/CURRENT: its checksum"):
        files.publish(manifest)
    assert files.list() == ([], [])
