"""Snapshots that shards put into an object store, on real servers and with a store that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from identity_writer import IdentityWriter
from object_server import Fault, ObjectServer, Request, first, object_server
from table_rows import ITEMS, USERS, VIRTUAL, build, chunk_of
from waiting import WAIT_S, scaled_s, until

from headrace import cli
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import SnapshotFiles, hash_folder
from headrace.paramserver.snapshots.remote import create_snapshot
from headrace.paramserver.snapshots.uploader import SnapshotUploader
from headrace.schemas.errors import HeadraceError, LogFencedError, OverloadedError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotManifest

ROWS = {
    ITEMS: chunk_of(ITEMS, range(0, 500, 3)),
    USERS: chunk_of(USERS, range(300), epoch=9),
    VIRTUAL: chunk_of(VIRTUAL, range(5000)),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with object_server() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        yield server


DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0, role=idl.Role.ADMIN)


def create(server: ServerProcess, name: str, **options: Any) -> SnapshotManifest:
    return asyncio.run(create_snapshot(server.address, dial=DIAL, name=name, timeout_s=WAIT_S, **options))


def rows_of(folder: Path) -> dict[str, dict[int, bytes]]:
    with SnapshotReader(folder) as reader:
        return {
            fqn: {
                row: record.tobytes()
                for ids, records in reader.rows(fqn)
                for row, record in zip(ids.tolist(), records, strict=True)
            }
            for fqn in sorted(reader.tables)
        }


def test_a_server_puts_snapshots_into_its_object_store(tmp_path: Path) -> None:
    """It goes up and not to disk, comes back on a bare machine with every row, and the next sends only what is new."""
    url = f"file://{tmp_path}/bucket"
    data = build(tmp_path / "data", ROWS, num_shards=2)
    with ServerProcess.start(data, object_store=url) as server:
        shown: list[tuple[int, int]] = []
        manifest = create(server, "one", on_upload=lambda *of: shown.append(of))
        assert shown and shown[-1][1] == manifest.size_bytes
        assert not list((data / "snapshots").iterdir())
        before = {path.name for path in (tmp_path / "bucket" / "files").iterdir()}
        again = create(server, "two")
        new = {path.name for path in (tmp_path / "bucket" / "files").iterdir()} - before
        assert sum(int(name.partition("-")[0]) for name in new) < again.size_bytes // 10
        with pytest.raises(HeadraceError, match="another snapshot 'one'"):
            create(server, "one")
        leased = create(server, "leased", lease_s=60)  # for a fetch from the server
        assert [path.name for path in (data / "snapshots").iterdir()] == [leased.name]
    stored = sorted(path.name for path in (tmp_path / "bucket").rglob("*"))
    second = build(tmp_path / "second", ROWS, num_shards=1)
    with pytest.raises(HeadraceError, match="another server: use another prefix"):
        ServerProcess.start(second, object_store=url)
    assert sorted(path.name for path in (tmp_path / "bucket").rglob("*")) == stored
    store = SnapshotStore.of_url(url)
    assert store.names() == ["one", "two"] and store.check("one") == manifest
    files = SnapshotFiles(tmp_path / "fetched")
    store.fetch("one", files)
    for name, shards in (("restored", 2), ("dealt", 3)):
        command = ["restore", url, "--name", "two", "--data", str(tmp_path / name), "--shards", str(shards)]
        assert cli.main(command) == 0
    with ServerProcess.start(tmp_path / "restored") as restored, ServerProcess.start(tmp_path / "dealt") as dealt:
        for other in (restored, dealt):
            create(other, "here")
            folder = other.data_dir / "snapshots" / "here"
            assert rows_of(folder) == rows_of(files.folder_of("one"))


def part_of(files: SnapshotFiles, name: str, shard: int, contents: dict[str, bytes], *, seq: int = 7) -> ShardPart:
    """Make a shard's copy, as `SnapshotMaker` does."""
    folder = files.new_folder(name) / f"shard-{shard:04d}"
    folder.mkdir(parents=True)
    for file_name, data in contents.items():
        (folder / file_name).write_bytes(data)
    return ShardPart(shard=shard, server_id="s", seq=seq, epoch=1, step=2, tables=(), files=hash_folder(folder))


def uploader_at(
    url: str, files: SnapshotFiles, shard: int = 0, first_seq: int | None = 1, **more: Any
) -> SnapshotUploader:
    return SnapshotUploader.open(url, files, bytes_per_s=0, server_id="s", shard=shard, first_seq=first_seq, **more)


def yes() -> bool:
    return True


async def test_shards_on_several_machines_make_one_snapshot(tmp_path: Path, server: ObjectServer) -> None:
    """Each uploads its part from a disk of its own; one manifest, put by any shard, makes the snapshot."""
    hosts = [SnapshotFiles(tmp_path / f"host{shard}" / "snapshots") for shard in range(2)]
    async with uploader_at(server.url, hosts[0]) as one, uploader_at(server.url, hosts[1], 1) as two:
        parts = [part_of(hosts[shard], "a", shard, {"1.sst": bytes([shard]) * 99, "CURRENT": b"x"}) for shard in (0, 1)]
        objects = [await up.upload("a", part, is_wanted=yes) for up, part in zip((one, two), parts, strict=True)]
        assert SnapshotStore.of_url(server.url).names() == []
        manifest = SnapshotManifest(name="a", created_us=1, parts=tuple(parts))
        await two.publish(manifest, objects[0] | objects[1])
        await one.publish(manifest, objects[0] | objects[1])
        for up in (one, two):
            up.settle("a")
            await until(lambda up=up: [lease.seq for lease in up.leases()] == [8])
    files = SnapshotFiles(tmp_path / "back")
    assert SnapshotStore.of_url(server.url).fetch("a", files) == manifest


async def test_a_copy_that_was_taken_over_adds_no_snapshot(tmp_path: Path, server: ObjectServer) -> None:
    """A newer copy's claim before an upload, during it, or before the manifest is put: no snapshot comes of it."""
    files = SnapshotFiles(tmp_path / "snapshots")
    part = part_of(files, "a", 0, {"1.sst": b"x"})
    checks: list[HeadraceError | None] = []

    def check_claim() -> None:
        if (error := checks.pop(0)) is not None:
            raise error

    settings: dict[str, Any] = {"bytes_per_s": 0, "server_id": "s", "shard": 0, "first_seq": None}
    fenced = LogFencedError("another copy has taken over")
    async with SnapshotUploader.open(server.url, files, check_claim=check_claim, **settings) as up:
        for taken_over in ([fenced], [None, fenced]):
            checks[:] = taken_over
            with pytest.raises(LogFencedError):
                await up.upload("a", part, is_wanted=yes)
            assert not checks
        checks[:] = [None, None, fenced]
        objects = await up.upload("a", part, is_wanted=yes)
        with pytest.raises(LogFencedError):
            await up.publish(SnapshotManifest(name="a", created_us=1, parts=(part,)), objects)
        assert not checks
    assert SnapshotStore.of_url(server.url).names() == []


async def test_log_is_kept_until_the_store_tells_what_it_has(tmp_path: Path, server: ObjectServer) -> None:
    """With the store away all log is kept, then that behind the newest; a part that may be published counts too."""
    refused: list[Request] = []

    def refuse(request: Request) -> Fault:
        refused.append(request)
        return Fault(status=403)

    server.fault = refuse
    files = SnapshotFiles(tmp_path / "snapshots")
    up = uploader_at(server.url, files, first_seq=3)
    async with up:
        assert [lease.seq for lease in up.leases()] == [3]
        await until(lambda: refused)
        server.fault = lambda _: None
        part = part_of(files, "a", 0, {"1.sst": b"x"}, seq=9)
        objects = await up.upload("a", part, is_wanted=yes)
        server.fault = lambda _: Fault(status=403)
        up.settle("a")
        assert sorted(lease.seq for lease in up.leases()) == [3, 10]
        server.fault = lambda _: None
        await up.publish(SnapshotManifest(name="a", created_us=1, parts=(part,)), objects)
        up._look_wanted.set()
        await until(lambda: [lease.seq for lease in up.leases()] == [10])
    async with uploader_at(server.url, files, first_seq=None) as fresh:
        assert fresh.leases() == []
        await until(lambda: [lease.seq for lease in fresh.leases()] == [10])


async def test_an_upload_that_nobody_waits_for_ends(tmp_path: Path, server: ObjectServer) -> None:
    """A caller that is gone ends the upload; the next one sends only what is missing."""
    files = SnapshotFiles(tmp_path / "snapshots")
    part = part_of(files, "a", 0, {f"{number}.sst": bytes([number]) * 2_000_000 for number in range(12)})

    def is_wanted() -> bool:
        return len([request for request in server.requests if request.method == "PUT"]) < 8

    async with uploader_at(server.url, files) as up:
        with pytest.raises(UnavailableError, match="nobody waits"):
            await up.upload("a", part, is_wanted=is_wanted)
        assert not up.status().is_running and up.status().failure
        there, before = len(server.keys("files/")), server.sent_bytes
        assert 0 < there < 12
        await up.upload("a", part, is_wanted=yes)
        assert server.sent_bytes - before <= (13 - there) * 2_000_000
        assert up.status().done_bytes == part.size_bytes


async def test_a_second_upload_waits_for_the_first(tmp_path: Path, server: ObjectServer) -> None:
    """Only one part goes up at a time, and another is told to come back; closing ends one to a store that is away."""
    files, held = SnapshotFiles(tmp_path / "snapshots"), threading.Event()
    part = part_of(files, "a", 0, {"1.sst": b"x"})

    def hold(request: Any) -> None:
        if request.method == "PUT" and "files/" in request.key:
            held.wait(WAIT_S)

    server.fault = hold
    # Less than the store's own deadline, at which an upload that nobody ends would end, too.
    async with asyncio.timeout(scaled_s(20)), uploader_at(server.url, files) as up:
        going = asyncio.create_task(up.upload("a", part, is_wanted=yes))
        await until(lambda: any("files/" in request.key for request in server.requests))
        with pytest.raises(OverloadedError):
            await up.upload("a", part, is_wanted=yes)
        held.set()
        await going
        server.fault = lambda _: Fault(status=503)
        server.requests.clear()
        part = part_of(files, "b", 0, {"1.sst": b"x"})
        going = asyncio.create_task(up.upload("b", part, is_wanted=yes))
        await until(lambda: server.requests)
    with pytest.raises(UnavailableError):
        await going


def test_a_wrong_url_ends_the_start_in_one_line(tmp_path: Path) -> None:
    """`serve` checks the setting before it writes anything."""
    with pytest.raises(UnavailableError, match="not a URL of an object store"):
        ServerProcess.start(tmp_path / "data", object_store="ftp://x")
    assert not (tmp_path / "data").exists()


async def test_the_log_behind_the_last_snapshot_but_one_is_kept(tmp_path: Path, server: ObjectServer) -> None:
    """Where another machine has to begin with a snapshot, the one before the newest stays usable as well."""
    files = SnapshotFiles(tmp_path / "snapshots")
    async with uploader_at(server.url, files, first_seq=None, num_kept=2) as up:
        for number, name in enumerate("abc", 1):
            part = part_of(files, name, 0, {f"{name}.sst": name.encode()}, seq=10 * number)
            objects = await up.upload(name, part, is_wanted=yes)
            await up.publish(SnapshotManifest(name=name, created_us=number, parts=(part,)), objects)
        up._look_wanted.set()
        await until(lambda: [lease.seq for lease in up.leases()] == [21, 31])


def test_training_goes_on_while_the_store_is_away(tmp_path: Path, server: ObjectServer) -> None:
    """With a store that answers nothing, writes are acked, the command says why it failed, and a later one succeeds."""
    with ServerProcess.start(tmp_path / "data", object_store=server.url) as headrace:
        port = int(headrace.address.rpartition(":")[2])
        server.fault = lambda _: Fault(resets=True)
        server.requests.clear()  # those of the shard's claim

        async def write_meanwhile() -> None:
            writer = await IdentityWriter.connect([port])
            await writer.write({row: row for row in range(64)})
            making = asyncio.create_task(
                create_snapshot(headrace.address, dial=DIAL, name="a", at_step=False, timeout_s=WAIT_S)
            )
            await until(lambda: server.requests)
            for _ in range(20):
                await writer.write({row: row for row in range(64)})
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
            server.fault = first(3, Fault(cuts=True))
            await create_snapshot(headrace.address, dial=DIAL, name="b", at_step=False, timeout_s=WAIT_S)
            await writer.close()

        asyncio.run(write_meanwhile())
    assert SnapshotStore.of_url(server.url).check("b").parts[0].seq >= 21
