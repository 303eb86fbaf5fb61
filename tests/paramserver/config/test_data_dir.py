"""The data directory: created once, and used by one server at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.config.cluster_file import ClusterFile
from headrace.paramserver.config.data_dir import (
    LOCK_NAME,
    MANIFEST_NAME,
    DataDir,
    Manifest,
    check_data_dir,
    is_in_use,
)
from headrace.paramserver.config.follow_state import FollowState
from headrace.schemas.errors import ConfigError, CorruptionError, HeadraceError, StorageError


def _make(path: Path, num_shards: int = 2) -> str:
    with DataDir.claim(path, num_shards=num_shards) as data_dir:
        data_dir.prepare()
        return data_dir.manifest.server_id


def _files(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*")}


def _stored(version: int, rest: str) -> str:
    """Return the text of a manifest."""
    start = f'"format": "headrace-data", "format_version": {version}, "server_id": "x"'
    return "{" + ", ".join(part for part in (start, rest) if part) + "}"


def test_makes_a_new_directory(tmp_path: Path) -> None:
    """A new directory gets a manifest, a lock and a directory a shard, missing parents included; one shard by default.

    Until `prepare` nothing is written. It opens again with its shards, given or not, and keeps its identity.
    """
    path = tmp_path / "a" / "b"
    with DataDir.claim(path, num_shards=None) as data_dir:
        assert data_dir.manifest.num_shards == 1 and not path.exists()
    server_id = _make(path)
    shards = {f"{shard}{each}" for shard in ("shard-0000", "shard-0001") for each in ("", "/log", "/claim.json")}
    assert _files(path) == {MANIFEST_NAME, LOCK_NAME, *shards}
    assert json.loads((path / MANIFEST_NAME).read_text()) == {
        "format": "headrace-data",
        "format_version": 5,
        "server_id": server_id,
        "num_shards": 2,
    }
    assert (path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    for num_shards in (None, 2):
        (path / LOCK_NAME).write_text("123\n")
        with DataDir.claim(path, num_shards=num_shards) as data_dir:
            assert (path / LOCK_NAME).read_text() == "123\n"
            data_dir.prepare()
            assert (data_dir.manifest.server_id, data_dir.manifest.num_shards) == (server_id, 2)


def test_refuses_another_number_of_shards(tmp_path: Path) -> None:
    """Rows are hashed by the number of shards, so another one is refused, with what to do; the lock is free again."""
    _make(tmp_path / "d")
    told = r"^--shards 3: .*/d has 2 shards, .* another directory: headrace restore .*/d --data NEW --shards 3$"
    with pytest.raises(ConfigError, match=told):
        DataDir.claim(tmp_path / "d", num_shards=3)
    with pytest.raises(ConfigError, match=told):
        check_data_dir(tmp_path / "d", num_shards=3)
    DataDir.claim(tmp_path / "d", num_shards=2).close()


def test_refuses_a_second_server(tmp_path: Path) -> None:
    """While a server holds the directory another is refused, with the pid of the first; also in a new directory."""
    with DataDir.claim(tmp_path / "d", num_shards=1) as data_dir:
        data_dir.prepare()
        with pytest.raises(ConfigError, match=rf"^--data .*: in use by another server \(pid {os.getpid()}\)$"):
            DataDir.claim(tmp_path / "d", num_shards=1)
    DataDir.claim(tmp_path / "d", num_shards=1).close()
    first = DataDir.claim(tmp_path / "new", num_shards=1)
    second = DataDir.claim(tmp_path / "new", num_shards=1)
    with first, second:
        first.prepare()
        with pytest.raises(ConfigError, match="in use by another server"):
            second.prepare()
    third = DataDir.claim(tmp_path / "e", num_shards=1)
    with third:
        _make(tmp_path / "e")
        with pytest.raises(ConfigError, match="another server made it just now"):
            third.prepare()


@pytest.mark.parametrize("name", ["notes.txt", "shard-0000/log"])
def test_refuses_a_foreign_directory(tmp_path: Path, name: str) -> None:
    """A directory with files and no manifest is refused and left untouched; a file, or a path through one, is none.

    The rest of a killed first start, on a fresh mount, is no obstacle.
    """
    found, killed = tmp_path / "found", tmp_path / "killed"
    (found / name).parent.mkdir(parents=True)
    (found / name).touch()
    before = _files(found)
    with pytest.raises(ConfigError, match=f"holds '{name.partition('/')[0]}' and no {MANIFEST_NAME}"):
        DataDir.claim(found, num_shards=1)
    assert _files(found) == before
    for path in (found / name, found / name / "d"):
        with pytest.raises(ConfigError, match=r"not a directory$"):
            DataDir.claim(path, num_shards=1)
    for name in ("lost+found", "shard-0000", "shard-0001/log", "shard-0007"):
        (killed / name).mkdir(parents=True)
    (killed / LOCK_NAME).write_text("1\n")
    (killed / (MANIFEST_NAME + ".tmp")).write_text("{")
    assert _make(killed) == _make(killed)


@pytest.mark.parametrize(
    ("text", "error", "problem"),
    [
        *((text, CorruptionError, "not a manifest") for text in ("", "[]", "[" * 100_000, '{"format": "other"}')),
        (_stored(6, ""), ConfigError, "format version 6, this Headrace reads 5"),
        *((_stored(of_02, '"num_shards": 7'), ConfigError, "--data NEW --shards 7") for of_02 in (1, 4)),
        (_stored(5, '"num_shards": 2, "log": "kafka"'), ConfigError, "the log is in 'kafka', which this Headrace does"),
        ('{"format": "headrace-data", "format_version": 5}', CorruptionError, "makes no sense"),
        (_stored(5, '"num_shards": true'), CorruptionError, "makes no sense"),
    ],
)
def test_refuses_a_wrong_manifest(tmp_path: Path, text: str, error: type[HeadraceError], problem: str) -> None:
    """The error names a manifest that cannot be read; the lock is free again."""
    _make(tmp_path / "d")
    manifest = tmp_path / "d" / MANIFEST_NAME
    good = manifest.read_text()
    manifest.write_text(text)
    with pytest.raises(error) as raised:
        DataDir.claim(tmp_path / "d", num_shards=2)
    assert problem in str(raised.value)
    assert str(tmp_path / "d") in str(raised.value)
    manifest.write_text(good)
    DataDir.claim(tmp_path / "d", num_shards=2).close()


@pytest.mark.parametrize(("gone", "what"), [(".", "directory"), ("log", "log")])
def test_refuses_a_missing_shard(tmp_path: Path, gone: str, what: str) -> None:
    """A shard's directory that is missing, or empty like one without its disk, is not silently recreated."""
    _make(tmp_path / "d")
    shutil.rmtree((tmp_path / "d" / "shard-0001" / gone).resolve())
    with (
        DataDir.claim(tmp_path / "d", num_shards=2) as data_dir,
        pytest.raises(CorruptionError, match=rf"shard-0001: the shard's {what} is missing; is its disk mounted\?$"),
    ):
        data_dir.prepare()


@contextlib.contextmanager
def _unprivileged() -> Iterator[None]:
    """Drop root's right to write everywhere, if the suite runs as root."""
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if uid == 0:
            os.seteuid(0)


def test_refuses_disks_that_were_exchanged(tmp_path: Path) -> None:
    """Shards in each other's place, or another server's, would be read as rows that are missing or somebody else's."""
    server_id, other = _make(tmp_path / "a"), _make(tmp_path / "b")
    shards = [tmp_path / "a" / f"shard-000{shard}" for shard in range(2)]
    for shard, is_of in ((shards[1], f"shard 1 of server {server_id}"), (tmp_path / "b/shard-0000", other)):
        shards[0].rename(tmp_path / "aside")
        shard.rename(shards[0])
        (tmp_path / "aside").rename(shard)
        with pytest.raises(ConfigError, match=is_of):
            check_data_dir(tmp_path / "a", num_shards=None)
        with pytest.raises(ConfigError, match=is_of), DataDir.claim(tmp_path / "a", num_shards=None) as data_dir:
            data_dir.prepare()
        shards[0].rename(tmp_path / "aside")
        shard.rename(shards[0])
        (tmp_path / "aside").rename(shard)
    assert _make(tmp_path / "a") == server_id


def test_not_writable() -> None:
    """A directory that may not be written or created is one clear line."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        for path in (Path(name), Path(name) / "d"):
            with (
                _unprivileged(),
                DataDir.claim(path, num_shards=1) as data_dir,
                pytest.raises(ConfigError, match=r"^--data .*: not writable \(Permission denied\)$"),
            ):
                data_dir.prepare()
        assert os.listdir(name) == []
        os.chmod(name, 0o000)
        with _unprivileged(), pytest.raises(ConfigError, match="not writable"):
            DataDir.claim(Path(name), num_shards=1)
        with _unprivileged(), pytest.raises(ConfigError, match="not writable"):
            is_in_use(Path(name))
        os.chmod(name, 0o777)
        Path(name, "shard-0000").mkdir(mode=0o000)  # of a first start by somebody else that was interrupted
        with _unprivileged(), pytest.raises(ConfigError, match="not writable"):
            DataDir.claim(Path(name), num_shards=1)


@pytest.mark.parametrize(
    ("number", "problem"),
    [(errno.ENOSPC, "the disk is full .*; make room"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "error$")],
)
def test_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, problem: str) -> None:
    """A full or broken disk is a storage error, and the next start recovers."""

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with DataDir.claim(tmp_path / "d", num_shards=1) as data_dir, pytest.raises(StorageError, match=problem):
            data_dir.prepare()
    assert not (tmp_path / "d" / MANIFEST_NAME).exists()
    _make(tmp_path / "d", 1)


_SERVER_ID = "3f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11"


class _Cluster:
    """Two nodes' directories under one path, as a cluster file gives them shards."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, name: str, a: list[int], b: list[int], **more: Any) -> Manifest:
        """Start a node once, with shards given to `a` and `b`; fill the logs of its shards."""
        nodes = {"a": {"host": "ha", "shards": a}, "b": {"host": "hb", "shards": b}}
        values = {"server_id": _SERVER_ID, "shards": len(a) + len(b), "nodes": nodes, **more}
        (self.path / "cluster.yaml").write_text(json.dumps(values))
        cluster = ClusterFile.load(self.path / "cluster.yaml")
        with DataDir.claim(self.path / name, num_shards=None, cluster=cluster, node=cluster.node(name)) as directory:
            directory.prepare()
            for shard in directory.manifest.shards:
                (directory.shard_path(shard) / "log" / "segment").touch()
            return directory.manifest

    def move(self, shard: int, source: str, target: str) -> None:
        name = f"shard-{shard:04d}"
        (self.path / target).mkdir(exist_ok=True)
        (self.path / source / name).rename(self.path / target / name)

    def stored(self, name: str) -> Any:
        return json.loads((self.path / name / MANIFEST_NAME).read_text())


def test_a_nodes_directory_has_its_shards(tmp_path: Path) -> None:
    """A node's directory is of the cluster's server, has the node's shards alone, and opens again."""
    cluster = _Cluster(tmp_path)
    for _ in range(2):
        assert cluster.start("a", [2, 0], [1]).shards == (0, 2)
    assert {path.name for path in (tmp_path / "a").glob("shard-*")} == {"shard-0000", "shard-0002"}
    stored = cluster.stored("a")
    assert (stored["server_id"], stored["num_shards"], stored["shards"]) == (_SERVER_ID, 3, [0, 2])
    with pytest.raises(ConfigError, match=r"has 2 of a cluster's 3 shards: serve it with --cluster FILE --node NAME$"):
        DataDir.claim(tmp_path / "a", num_shards=None)


def test_a_shards_directory_moves_to_another_node(tmp_path: Path) -> None:
    """A shard that the file gives to another node is refused on both until its directory has been moved."""
    cluster = _Cluster(tmp_path)
    cluster.start("a", [0, 2], [1])
    cluster.start("b", [0, 2], [1])
    with pytest.raises(ConfigError, match=r"/a: has shard 2, which .* gives to node b: "):
        cluster.start("a", [0], [1, 2])
    with pytest.raises(ConfigError, match=r"/b: lacks shard 2, which .* gives to node b: .* --shard 2 --to b$"):
        cluster.start("b", [0], [1, 2])
    with pytest.raises(ConfigError, match=r"lacks shard 2, .*; or run headrace restore s3://bucket .* --shard 2$"):
        cluster.start("b", [0], [1, 2], object_store="s3://bucket")
    cluster.move(2, "a", "b")
    assert cluster.start("a", [0], [1, 2]).shards == (0,)
    assert cluster.start("b", [0], [1, 2]).shards == (1, 2)
    assert (cluster.stored("a")["shards"], cluster.stored("b")["shards"]) == ([0], [1, 2])


def test_shards_move_to_a_new_node(tmp_path: Path) -> None:
    """A directory that holds nothing but moved shards is a node's, if they are all that the file gives to it."""
    cluster = _Cluster(tmp_path)
    cluster.start("a", [0, 1, 2], [3])
    cluster.move(1, "a", "b")
    with pytest.raises(ConfigError, match=r"/b: lacks shard 2"):
        cluster.start("b", [0], [1, 2, 3])
    cluster.move(2, "a", "b")
    (tmp_path / "b" / ".shard-0001.recover").mkdir()  # of a restore that was killed
    file = tmp_path / "cluster.yaml"
    file.write_text(file.read_text().replace("[1, 2, 3]", "[1, 2]").replace("[0]", "[0, 3]"))
    moved = ClusterFile.load(file)
    found = check_data_dir(tmp_path / "b", num_shards=None, cluster=moved, node=moved.node("b"))
    assert found is not None and found.shards == (1, 2)
    assert cluster.start("b", [0, 3], [1, 2]).shards == (1, 2)


def test_a_server_of_one_machine_becomes_a_cluster(tmp_path: Path) -> None:
    """Its directory is a node's that has all shards, unchanged, and then its shards may move."""
    (tmp_path / "a").mkdir()
    cluster = _Cluster(tmp_path)
    with DataDir.claim(tmp_path / "a", num_shards=2) as directory:
        directory.manifest = Manifest(server_id=_SERVER_ID, num_shards=2)
        directory.prepare()
    before = (tmp_path / "a" / MANIFEST_NAME).read_bytes()
    (tmp_path / "cluster.yaml").write_text(
        json.dumps({"server_id": _SERVER_ID, "shards": 2, "nodes": {"a": {"host": "h", "shards": [0, 1]}}})
    )
    whole = ClusterFile.load(tmp_path / "cluster.yaml")
    with DataDir.claim(tmp_path / "a", num_shards=None, cluster=whole, node=whole.node("a")) as directory:
        directory.prepare()
        for shard in range(2):
            (directory.shard_path(shard) / "log" / "segment").touch()
    assert (tmp_path / "a" / MANIFEST_NAME).read_bytes() == before
    cluster.move(1, "a", "b")
    assert cluster.start("a", [0], [1]).shards == (0,)
    assert cluster.start("b", [0], [1]).shards == (1,)


def test_a_nodes_directory_of_another_cluster(tmp_path: Path) -> None:
    """Another server's directory, one of another number of shards, and one with a disk that is not mounted are told."""
    cluster = _Cluster(tmp_path)
    cluster.start("a", [0], [1])
    with pytest.raises(ConfigError, match=r"shards: 3: .* is of a server of 2 shards, .*: say shards: 2$"):
        cluster.start("a", [0, 1], [2])
    with pytest.raises(ConfigError, match=rf"is of server {_SERVER_ID}, and .* of 1f0c6e0e"):
        cluster.start("a", [0], [1], server_id="1f0c6e0e-8a55-4c6f-9f0f-2d6a6a1f7a11")
    (tmp_path / "a" / "shard-0000" / "log" / "segment").unlink()
    (tmp_path / "a" / "shard-0000" / "log").rmdir()
    with pytest.raises(CorruptionError, match="the shard's log is missing; is its disk mounted"):
        cluster.start("a", [0], [1])


def test_a_directory_knows_where_its_log_is(tmp_path: Path) -> None:
    """A directory tells where its log is, and none is served with the other log."""
    with DataDir.claim(tmp_path / "nats", num_shards=2, log="nats") as directory:
        directory.prepare()
    stored = json.loads((tmp_path / "nats" / MANIFEST_NAME).read_text())
    assert (stored["log"], "shards" in stored) == ("nats", False)
    with DataDir.claim(tmp_path / "nats", num_shards=None, log="nats") as directory:
        assert directory.manifest == Manifest(server_id=stored["server_id"], num_shards=2, log="nats")
    with pytest.raises(ConfigError, match=r"its update log is in NATS: serve it with --log .* --follow HOST:PORT"):
        DataDir.claim(tmp_path / "nats", num_shards=None)
    _make(tmp_path / "files")
    with pytest.raises(
        ConfigError, match=r"its update log is in files: serve it without --log; .* --follow HOST:PORT --log"
    ):
        DataDir.claim(tmp_path / "files", num_shards=None, log="nats")
    with pytest.raises(ConfigError, match="in files"):
        check_data_dir(tmp_path / "files", num_shards=None, log="nats")


def test_a_node_makes_copies_that_come_from_the_log(tmp_path: Path) -> None:
    """With the log elsewhere, a node makes the shards that it lacks, its standbys too; nothing is moved by hand."""
    nodes = {"a": {"host": "h", "shards": [0], "standbys": [1]}, "b": {"host": "i", "shards": [1]}}
    values = {"server_id": _SERVER_ID, "shards": 2, "log": "nats://n", "nodes": nodes}
    (tmp_path / "cluster.yaml").write_text(json.dumps(values))
    cluster = ClusterFile.load(tmp_path / "cluster.yaml")
    for name, shards in (("b", [1]), ("a", [0, 1]), ("a", [0, 1])):
        with DataDir.claim(
            tmp_path / name, num_shards=None, cluster=cluster, node=cluster.node(name), log="nats"
        ) as directory:
            directory.prepare()
            assert list(directory.manifest.shards) == shards
            assert all((directory.shard_path(shard) / "log").is_dir() for shard in shards)
        shutil.rmtree(tmp_path / name / "shard-0001")


@pytest.mark.parametrize(
    ("on_disk", "role", "problem"),
    [
        ("nothing", "standbys", None),
        ("nothing", "shards", r"lacks shard 1, .* under its standbys, .* headrace promote --shard 1 --to a$"),
        ("rows", "shards", None),
        ("rows", "standbys", r"rows of its own, .* remove the directory, and it follows"),
        ("copy", "standbys", None),
        ("copy", "shards", r"has not taken over shard 1, .* headrace promote --shard 1 --to a$"),
        ("promoted", "shards", None),
        ("promoted", "standbys", None),  # whoever has taken the shard over has it, whatever an older file says
        ("copy", "follow", None),
        ("promoted", "follow", None),  # `follow` may stay in the file
        ("rows", "follow", r"rows of its own, which cannot follow h:1: take follow: out"),
        ("promoted", "none", r"has shard 1, .* if that has taken it over, remove .*shard-0001; if not, give the shard"),
    ],
)
def test_what_the_disk_has_and_the_file_says(tmp_path: Path, on_disk: str, role: str, problem: str | None) -> None:
    """What could make two owners of a shard, or an empty one, is refused with what to do, by `doctor` too."""
    cluster = _Cluster(tmp_path)
    cluster.start("a", [0, 1] if on_disk == "rows" else [0], [2] if on_disk == "rows" else [1, 2])
    folder = tmp_path / "a" / "shard-0001"
    if role == "follow":  # the other shard has taken over
        FollowState(copy_id="a", has_begun=True, is_promoted=True).write(tmp_path / "a" / "shard-0000")
    if on_disk in ("copy", "promoted"):
        (folder / "log").mkdir(parents=True)
        (folder / "log" / "segment").touch()
        FollowState(copy_id="a", has_begun=True, is_promoted=on_disk == "promoted").write(folder)
    has_it = role in ("shards", "follow")
    a = {"shards": [0, 1]} if has_it else {"shards": [0], "standbys": [1] if role == "standbys" else []}
    nodes = {"a": {"host": "ha", **a}, "b": {"host": "hb", "shards": [2] if has_it else [1, 2]}}
    values = {"server_id": _SERVER_ID, "shards": 3, "nodes": nodes} | ({"follow": "h:1"} if role == "follow" else {})
    (tmp_path / "cluster.yaml").write_text(json.dumps(values))
    changed = ClusterFile.load(tmp_path / "cluster.yaml")
    for serve in (False, True):
        refused = contextlib.nullcontext() if problem is None else pytest.raises(ConfigError, match=problem)
        with refused:
            if not serve:
                check_data_dir(tmp_path / "a", num_shards=None, cluster=changed, node=changed.node("a"))
                continue
            with DataDir.claim(tmp_path / "a", num_shards=None, cluster=changed, node=changed.node("a")) as directory:
                directory.prepare()
                assert directory.manifest.shards == (0, 1)
