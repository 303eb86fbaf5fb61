"""Snapshots as files: published whole or not at all, found damage, removal."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import pytest

from headrace.paramserver.snapshots import snapshot_files
from headrace.paramserver.snapshots.snapshot_files import SnapshotFiles, check_file, hash_folder, verify_snapshot
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, RequestError, StorageError
from headrace.schemas.snapshot_manifest import MANIFEST_NAME, ShardPart, SnapshotManifest


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


def test_published_snapshots_are_listed_and_read(tmp_path: Path) -> None:
    """Before it is published a snapshot is not there; afterwards it is, whole, and stays readable in pieces."""
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
    (tmp_path / "snapshots" / "going").mkdir()  # as it looks to who has listed it just before it was removed
    assert files.list() == ([early, late], [])


def test_snapshots_are_in_the_order_of_the_log(tmp_path: Path) -> None:
    """A clock that went back between two of a store does not change their order; it orders stores alone."""
    files = SnapshotFiles(tmp_path / "snapshots")
    for name, seq, created_us, server_id in [
        ("a", 3, 9, "s"),
        ("b", 5, 2, "s"),
        ("c", 4, 7, "s"),
        ("d", 90, 8, "t"),
        ("e", 91, 1, "t"),
    ]:
        files.publish(make(files, name, seq=seq, created_us=created_us, server_id=server_id))
    assert [manifest.name for manifest in files.list()[0]] == ["d", "e", "a", "c", "b"]
    newest = [files.newest(server_id) for server_id in ("s", "t", None)]
    assert [manifest and manifest.name for manifest in newest] == ["b", "e", "b"]
    assert files.newest("another") is None


def test_a_shard_s_part_is_on_disk_once_it_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, their names, and the folder's own name: publishing syncs none of them again."""
    synced: list[Path] = []
    monkeypatch.setattr(snapshot_files, "fsync_path", synced.append)
    files = SnapshotFiles(tmp_path)
    make(files, "a")
    folders = [files.new_folder("a") / f"shard-{shard:04d}" for shard in range(2)]
    assert synced == [path for f in folders for path in (f / "000001.sst", f / "CURRENT", f, f.parent)]


def test_publishing_syncs_every_name_on_the_way_to_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifest and folder before the rename; then the directory of snapshots, and the one that this was made in."""
    files = SnapshotFiles(tmp_path / "snapshots")
    manifest = make(files, "a")
    synced: list[tuple[str, bool]] = []

    def sync(path: Path) -> None:
        synced.append((path.name, files.folder_of("a").exists()))

    monkeypatch.setattr(snapshot_files, "fsync_path", sync)
    files.publish(manifest)
    assert synced == [("manifest.json", False), (".new-a", False), ("snapshots", True), (tmp_path.name, True)]


def test_nothing_but_files_of_the_manifest_is_read(tmp_path: Path) -> None:
    """A path that the manifest does not name is not served, wherever it leads."""
    files = SnapshotFiles(tmp_path / "snapshots")
    files.publish(make(files, "a"))
    (tmp_path / "secret").write_text("no")
    for path in ("../../secret", "shard-0000/../../../secret", "shard-0000", str(tmp_path / "secret")):
        with pytest.raises(GoneError):
            files.read("a", path, 0, 10)
    with pytest.raises(RequestError):
        files.read("../snapshots/a", "", 0, 10)


def test_a_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch asks for pieces by the thousand, and retention and metrics look at all snapshots: each reads it once."""
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
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # another one of that name
    (tmp_path / "b" / MANIFEST_NAME).write_bytes(make(files, "b", seq=9).encode())
    assert (newest := files.newest()) is not None and newest.parts[0].seq == 9
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(GoneError):
        files.read("b", "shard-0000/CURRENT", 0, 100)
    assert files._read_manifests.keys() == {"a"}


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
def test_damage_is_found_and_named(tmp_path: Path, damage: str) -> None:
    """A flipped bit, a cut file, a missing one and a changed manifest are each an error that names the file."""
    files = SnapshotFiles(tmp_path)
    files.publish(make(files, "a"))
    path = files.folder_of("a") / ("manifest.json" if damage == "manifest" else "shard-0001/000001.sst")
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"a/manifest\.json: " if damage == "manifest" else "000001.sst"):
        verify_snapshot(files.folder_of("a"))
    assert len(files.list()[1]) == (damage == "manifest")


def test_what_rots_between_two_snapshots_is_found(tmp_path: Path) -> None:
    """A file that two snapshots share has the first one's checksum in both, so damage since is not given a new one."""
    files = SnapshotFiles(tmp_path)
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
    shared.unlink()  # a snapshot may be removed meanwhile: the files that are left are known
    assert [file.crc32c for file in files.row_files_of_newest("s").values()] == [linked.crc32c]


@pytest.mark.parametrize("is_missing", [True, False])
def test_what_is_not_whole_is_not_published(tmp_path: Path, is_missing: bool) -> None:
    """A file that is missing or short when it comes to publishing, and a name that is taken, are refused."""
    files = SnapshotFiles(tmp_path)
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


def test_a_name_goes_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No power failure leaves half a snapshot published; what an interrupted removal has left stands in no way."""
    files = SnapshotFiles(tmp_path)
    (tmp_path / ".gone-a" / "shard-0000").mkdir(parents=True)
    files.publish(make(files, "a"))
    synced: list[tuple[Path, bool, bool]] = []

    def sync(path: Path) -> None:
        synced.append((path, files.folder_of("a").exists(), (tmp_path / ".gone-a" / "manifest.json").exists()))

    monkeypatch.setattr(snapshot_files, "fsync_path", sync)
    files.remove("a")
    assert synced == [(tmp_path, False, True)]
    assert list(tmp_path.iterdir()) == []


def test_removed_snapshots_are_gone(tmp_path: Path) -> None:
    """A removed snapshot is not listed, not readable, and leaves nothing; nor does an interrupted removal."""
    files = SnapshotFiles(tmp_path)
    files.publish(make(files, "a"))
    files.remove("a")
    with pytest.raises(GoneError):
        files.read("a", "", 0, 1)
    with pytest.raises(GoneError):
        files.remove("a")
    (tmp_path / ".gone-b").mkdir()
    make(files, "c")
    files.sweep()
    assert [path.name for path in tmp_path.iterdir()] == [".new-c"]  # young: somebody may be at it
    files.publish(make(files, "d"))
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    files.sweep()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    with pytest.raises(ConfigError):
        verify_snapshot(tmp_path / "nothing")


def test_a_fetch_of_days_is_not_swept(tmp_path: Path) -> None:
    """An attempt into one of whose files bytes have come lately is at work, however old its folders are."""
    files = SnapshotFiles(tmp_path)
    make(files, "a")
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    with open(files.new_folder("a") / "shard-0001" / "000001.sst", "ab") as file:
        file.write(b"more")
    files.sweep()
    assert files.new_folder("a").is_dir()


def test_what_nobody_reads_is_removed_when_its_lease_has_run_out(tmp_path: Path) -> None:
    """Reading renews the lease of a snapshot that was made for one reader, which is nobody's newest; others stay."""
    files = SnapshotFiles(tmp_path)
    stays = make(files, "stays", seq=1)
    files.publish(stays)
    for name in ("left", "read"):
        files.publish(dataclasses.replace(make(files, name), lease_s=60))
    assert files.sweep() == ()
    assert files.newest() == stays
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    files.read("read", "shard-0000/CURRENT", 0, 1)
    assert files.sweep() == ("left",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["read", "stays"]


def test_a_disk_that_fails_under_a_lease_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot whose age cannot be read is told of as any failure of the disk: who sweeps goes on."""
    files = SnapshotFiles(tmp_path)
    files.publish(dataclasses.replace(make(files, "left"), lease_s=60))

    def fail(path: Path) -> float:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(snapshot_files, "_idle_s", fail)
    with pytest.raises(StorageError, match=f"{tmp_path}: Input/output error"):
        files.sweep()


def test_a_removal_and_a_sweep_may_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever of the two removes the files, the removal has done what it was asked for."""
    files = SnapshotFiles(tmp_path)
    files.publish(make(files, "a"))
    remove_tree = shutil.rmtree

    def sweep_first(path: Path, **settings: bool) -> None:
        if not settings:
            files.sweep()
        remove_tree(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", sweep_first)
    files.remove("a")
    assert list(tmp_path.iterdir()) == []


def test_parts_of_two_attempts_make_no_snapshot(tmp_path: Path) -> None:
    """Files of the right names and lengths that another attempt of that name has made are not published."""
    files = SnapshotFiles(tmp_path)
    manifest = make(files, "a")
    (files.new_folder("a") / "shard-0001" / "CURRENT").write_bytes(b"y" * 16)
    with pytest.raises(CorruptionError, match="shard-0001/CURRENT: its checksum"):
        files.publish(manifest)
    assert files.list() == ([], [])
