"""Servers and shards made again from their object store, with real servers and a directory as the store."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counted_training import make_snapshot
from held_ports import hold_ports
from killed_process import run_killed
from set_back_training import ROWS, Trainer
from shard_servers import serve_shards
from stored_rows import read_rows
from streamed_training import attached
from watched_server import wait_until

from headrace.cli import main
from headrace.paramserver.archive import recovery
from headrace.paramserver.archive.points import RestorePoint
from headrace.paramserver.archive.recovery import restore_server
from headrace.paramserver.config.data_dir import find_manifest
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import ConfigError, CorruptionError, GoneError, StorageError, UnavailableError

FQN = "t.weight"
_NOT_THE_RIGHT_COPY = r"another copy of shard \d is the right one|is an older copy, or another"


class Place:
    """Where a server and its object store are."""

    def __init__(self, directory: Path) -> None:
        self.data, self.url = directory / "data", f"file://{directory / 'store'}"
        self.store_path = directory / "store"
        self.port = hold_ports(2)

    def serve(self, data: Path | None = None, **settings: Any) -> ServerProcess:
        settings = {"object_store": self.url, "archive_segment_s": 0.1, "port": self.port, **settings}
        return ServerProcess.start(data or self.data, **settings)

    @property
    def store(self) -> ObjectStore:
        return ObjectStore.of_url(self.url, deadline_s=1.0)

    def wait_archived(self, server: ServerProcess) -> None:
        """Wait until the archive has what every shard has; objects alone do not tell, as some may be void."""
        seqs = [status["log_seq"] for status in statuses(server)]

        def is_archived() -> bool:
            return all(
                status["archive"].archived_seq >= seq for status, seq in zip(statuses(server), seqs, strict=True)
            )

        wait_until(is_archived, "the archive")


def statuses(server: ServerProcess) -> list[dict[str, Any]]:
    async def ask() -> list[dict[str, Any]]:
        found = []
        host, first = parse_address(server.address, default_port=0)
        for shard in range(len(server.shard_pids)):
            async with await ParamServerClient.connect(host, first + shard, timeout_s=60) as client:
                reply = await client.status()
                found.append({"log_seq": reply.log_seq, "archive": reply.archive})
        return found

    return asyncio.run(ask())


def weights_of(address: str) -> tuple[np.ndarray, np.ndarray]:
    rows = read_rows(address, FQN, range(ROWS))
    return rows.presence, rows.weights


_Archived = tuple[Place, dict[int, torch.Tensor]]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, torch.Tensor]]:
    """Where a stopped server has a snapshot at step 2 and five archived steps, and the trainer's rows after each."""
    path, trainer, after = tmp_path_factory.mktemp("original"), Trainer(), dict[int, torch.Tensor]()
    place = Place(path)
    with place.serve(shards=2) as server:
        with attached(server.address, trainer, run="run") as streamer:
            for step in range(1, 6):
                trainer.step(0, 60 * step)
                streamer.flush()
                after[streamer.stats().step] = trainer.table.weight.detach().clone()
                if step == 2:
                    make_snapshot(server)
        place.wait_archived(server)
    return path, after


@pytest.fixture
def archived(original: tuple[Path, dict[int, torch.Tensor]], place: Place, tmp_path: Path) -> _Archived:
    """A copy of it, which the test may change."""
    shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)
    return place, original[1]


def check_rows(address: str, expected: torch.Tensor, num_rows: int) -> None:
    check_values(*weights_of(address), expected, num_rows)


def check_values(presence: np.ndarray, weights: np.ndarray, expected: torch.Tensor, num_rows: int) -> None:
    assert presence.tolist() == [1] * num_rows + [0] * (ROWS - num_rows)
    assert np.array_equal(weights[:num_rows], expected[:num_rows].numpy())


def check_directory(directory: Path, expected: torch.Tensor, num_rows: int) -> None:
    """Check the rows that a directory's shards serve in this process, away from the object store."""
    manifest = find_manifest(directory)
    assert manifest is not None

    async def read() -> Rows:
        async with (
            serve_shards(directory, 2, server_id=manifest.server_id) as (port, _),
            await EmbeddingReader.connect(f"127.0.0.1:{port}") as reader,
        ):
            return await reader.get(FQN, np.arange(ROWS))

    rows = asyncio.run(read())
    check_values(rows.presence, rows.weights, expected, num_rows)


def test_a_lost_shard_has_all_that_was_archived(archived: _Archived) -> None:
    """A deleted shard is made of a snapshot and the archive behind it: no row of any step is missing."""
    place, after = archived
    shutil.rmtree(place.data / "shard-0001")
    (restored,) = restore_server(place.store, place.data, shards=[1])
    assert restored.snapshot
    check_directory(place.data, after[max(after)], 300)


@pytest.mark.parametrize("step", [2, 4])
def test_all_shards_are_cut_at_a_step(archived: _Archived, tmp_path: Path, step: int) -> None:
    """Restored to a step, shards have its rows, bit for bit, and none of later ones."""
    place, after = archived
    number = sorted(after)[step - 1]
    restore_server(place.store, tmp_path / "back", at=RestorePoint.parse(f"step={number}"))
    check_directory(tmp_path / "back", after[number], 60 * step)


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_a_lost_shard_is_restored_amid_training(place: Place, tmp_path: Path, has_snapshot: bool) -> None:
    """A deleted shard comes back from the object store; after the next flush trainer, server and replica are equal."""
    trainer = Trainer()
    with place.serve(shards=2) as server:
        streamer = attached(server.address, trainer, run="run")
        trainer.step(0, 100)
        streamer.flush()
        if has_snapshot:
            make_snapshot(server)
        trainer.step(50, 200)
        streamer.evict(FQN, [7, 8])
        streamer.flush()
        place.wait_archived(server)
    # From here on the archive gets nothing: what is acked now is lost with the disk.
    with place.serve(archive_segment_s=3600) as server:
        trainer.step(100, 300)
        streamer.evict(FQN, [9, 10])
        streamer.flush()
        replica = EmbeddingReplica(server.address, fetch_wait_s=0.2)
        server.kill()
    shutil.rmtree(place.data / "shard-0001")
    assert main(["restore", place.url, "--data", str(place.data), "--shard", "1"]) == 0
    with streamer, replica, place.serve() as server:
        trainer.step(290, 310)
        streamer.flush()  # on_set_back is `auto`: the server says that it has an archive
        assert streamer.audit().is_equal
        presence, weights = weights_of(server.address)
        present = np.flatnonzero(presence == 1)
        assert not set(present) & {7, 8, 9, 10}
        assert set(present) >= set(range(310)) - {7, 8, 9, 10}
        values = trainer.table.weight.detach()
        assert np.array_equal(weights[present], values.numpy()[present])
        wanted = torch.zeros(ROWS, 4)
        wanted[present] = values[present]
        wait_until(lambda: torch.equal(replica.lookup(FQN, torch.arange(ROWS)), wanted), "an equal replica")
        place.wait_archived(server)
    # The restored shard archives behind its claim, and can be restored in turn.
    fresh = tmp_path / "fresh"
    restore_server(place.store, fresh)
    with place.serve(fresh) as server:
        presence, again = weights_of(server.address)
        assert np.array_equal(np.flatnonzero(presence == 1), present)
        assert np.array_equal(again[present], weights[present])


@pytest.mark.parametrize("step", [2, 3])
def test_a_server_goes_back_to_a_step(archived: _Archived, tmp_path: Path, step: int) -> None:
    """All shards are cut at the step: with its rows, and none of later ones; a new trainer goes on from there."""
    place, after = archived
    number = sorted(after)[step - 1]
    target = tmp_path / "back"
    restored = restore_server(place.store, target, at=RestorePoint.parse(f"step={number}"))
    assert [(shard.point.step, shard.point.is_exact) for shard in restored if shard.point] == [(number, True)] * 2
    with place.serve(target) as server:
        check_rows(server.address, after[number], 60 * step)
        trainer = Trainer()
        trainer.table.weight.data.copy_(after[number])
        with attached(server.address, trainer, run="run") as streamer:
            trainer.step(0, 10)
            streamer.flush()
            assert np.array_equal(weights_of(server.address)[1][:10], trainer.table.weight.detach().numpy()[:10])
        place.wait_archived(server)
    # What was archived behind the point is void, and the old directory is not the right one any more.
    with pytest.raises(UnavailableError, match=_NOT_THE_RIGHT_COPY):
        place.serve(place.data)


def test_a_restored_copy_does_not_take_over_from_a_living_server(place: Place, tmp_path: Path) -> None:
    """A directory that was restored as a drill, and is started when the archive has gone on, is refused."""
    trainer, drill = Trainer(), tmp_path / "drill"
    with place.serve(shards=2) as server, attached(server.address, trainer, run="run") as streamer:
        trainer.step(0, 50)
        streamer.flush()
        place.wait_archived(server)
        restored = restore_server(place.store, drill)
        trainer.step(0, 100)
        streamer.flush()
        place.wait_archived(server)
        with pytest.raises(UnavailableError, match=r"has gone on to seq \d+ since this directory was restored"):
            place.serve(drill, port=hold_ports(2))
        with place.serve(drill, port=hold_ports(2), object_store=None) as beside:
            assert [status["log_seq"] for status in statuses(beside)] == [shard.seq for shard in restored]
        trainer.step(0, 60)
        streamer.flush()
        assert streamer.audit().is_equal


def test_a_snapshot_of_a_time_that_was_given_up_is_not_restored(
    archived: _Archived, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot that is ahead of where a server went back to is void: the next restore has what was acked since."""
    place, after = archived
    with place.serve() as server:
        make_snapshot(server)  # of step 5
    (first, void) = [manifest.name for manifest in SnapshotStore(place.store).list()]
    number = sorted(after)[2]
    restore_server(place.store, tmp_path / "back", at=RestorePoint.parse(f"step={number}"))
    trainer = Trainer()
    trainer.table.weight.data.copy_(after[number])
    with place.serve(tmp_path / "back") as server:
        with attached(server.address, trainer, run="run") as streamer:
            trainer.step(0, 10)
            streamer.flush()
        place.wait_archived(server)
    shutil.rmtree(tmp_path / "back")
    restored = restore_server(place.store, tmp_path / "again")
    assert {shard.snapshot for shard in restored} == {first}
    with place.serve(tmp_path / "again") as server:
        check_rows(server.address, trainer.table.weight.detach(), 180)
    snapshots = SnapshotStore(place.store)
    newest = snapshots.newest()
    assert newest is not None and newest.name == first
    assert [manifest.name for manifest in snapshots.list(with_void=True)] == [first, void]
    assert main(["snapshot", "list", place.url]) == 0
    assert f"Void, because a shard was set back to before: {void}." in capsys.readouterr().out
    assert main(["snapshot", "prune", place.url, "--keep", "1"]) == 0
    assert snapshots.names() == [first]


def test_a_shard_goes_back_to_a_seq(archived: _Archived) -> None:
    """One shard is cut at any record."""
    place, _ = archived
    shutil.rmtree(place.data / "shard-0000")
    with pytest.raises(ConfigError, match="is archived up to seq"):
        restore_server(place.store, place.data, at=RestorePoint(seq=10**6), shards=[0])
    (restored,) = restore_server(place.store, place.data, at=RestorePoint(seq=5), shards=[0])
    assert restored.seq == 5
    with place.serve() as server:
        assert statuses(server)[0]["log_seq"] == 5


def test_points_that_are_none(archived: _Archived, tmp_path: Path) -> None:
    """A time is the last step that had ended by then; each user's mistake is one line, and nothing is made."""
    place, after = archived
    target = tmp_path / "target"
    for at, shards, text in (
        (RestorePoint(seq=5), None, "a seq is of one shard"),
        (RestorePoint.parse("time=2001-01-01T00:00:00"), None, "has no step by then that all shards have; the oldest"),
        (None, [2], "has shards 0 to 1"),
        (None, [1], "not empty"),
        (None, None, "not empty"),
    ):
        with pytest.raises(ConfigError, match=text):
            restore_server(place.store, target if at else place.data, at=at, shards=shards)
    with pytest.raises(ConfigError, match="no server has snapshots or an archive here"):
        restore_server(ObjectStore.of_url(f"file://{tmp_path / 'empty'}", deadline_s=0.1), target)
    for text in ("step=x", "step=-1", "5", "time=yesterday", "seq="):
        with pytest.raises(ConfigError, match="give seq=N, step=N or time="):
            RestorePoint.parse(text)
    assert not target.exists()
    now = datetime.now(UTC).replace(tzinfo=None).isoformat()
    restored = restore_server(place.store, target, at=RestorePoint.parse(f"time={now}"))
    assert {shard.point.step for shard in restored if shard.point} == {max(after)}


def test_a_bare_machine_serves_what_its_object_store_has(archived: _Archived, tmp_path: Path) -> None:
    """An empty directory is refused with the command to run; `--restore` runs it; a directory with a store stays."""
    place, after = archived
    bare = tmp_path / "bare"
    with pytest.raises(UnavailableError, match=r"--restore, or run headrace restore file://\S+ --data \S+bare"):
        place.serve(bare)
    for _ in range(2):
        with place.serve(bare, restore=True) as server:
            check_rows(server.address, after[max(after)], 300)
    with pytest.raises(UnavailableError, match="--restore: from where"):
        place.serve(tmp_path / "other", object_store=None, restore=True)
    with pytest.raises(UnavailableError, match="has no server; start without --restore"):
        place.serve(tmp_path / "other", object_store=f"file://{tmp_path / 'new'}", restore=True)


@pytest.mark.parametrize("name", ["_fetch", "_cut_at", "_settle", "note_restored", "fsync_tree"])
def test_a_killed_restore_leaves_nothing_half(archived: _Archived, tmp_path: Path, name: str) -> None:
    """Wherever it is killed, the directory is complete or missing, and the next restore or start goes on."""
    place, after = archived
    target = tmp_path / "target"
    work = f"""
from headrace.paramserver.archive.points import RestorePoint
from headrace.paramserver.archive.recovery import restore_server
from headrace.paramserver.system.object_store import ObjectStore
restore_server(ObjectStore.of_url({place.url!r}), Path({str(target)!r}), at=RestorePoint(step=10**9))
"""
    for nth in (1, 2):
        if not run_killed(work, at=f"headrace.paramserver.archive.recovery.{name}", nth=nth):  # it is called once
            assert nth == 2
            break
        assert not target.exists()
    if not target.exists():
        restore_server(place.store, target)
    with place.serve(target) as server:
        check_rows(server.address, after[max(after)], 300)
    with pytest.raises(UnavailableError, match=_NOT_THE_RIGHT_COPY):
        place.serve()


def test_a_full_disk_is_one_line(archived: _Archived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is found before, or on the way; nothing is left."""
    place, _ = archived
    target = tmp_path / "target"
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match=r"what is restored takes .* nothing was written"):
            restore_server(place.store, target)

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recovery, "write_excerpt", fail)
    with pytest.raises(StorageError, match=r"the disk is full; .* nothing was made"):
        restore_server(place.store, target)
    assert [path.name for path in tmp_path.iterdir() if "target" in path.name] == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        Path.unlink,
    ],
    ids=["altered", "cut", "lost"],
)
@pytest.mark.parametrize("folder", ["archive/0001", "files"])
def test_a_damaged_object_is_found(
    archived: _Archived, tmp_path: Path, spoil: Callable[[Path], Any], folder: str
) -> None:
    """A segment or a file that was altered, cut or lost is named, and nothing is made."""
    place, _ = archived
    target = tmp_path / "target"
    spoiled = max((place.store_path / folder).iterdir(), key=lambda path: path.stat().st_size)
    spoil(spoiled)
    if spoil is Path.unlink and folder != "files":
        # A listing without it looks like the end of the archive: what is before the gap is restored.
        restored = restore_server(place.store, target)
        assert min(shard.seq for shard in restored) < 6
        return
    with pytest.raises((CorruptionError, GoneError), match=spoiled.name[:20]):
        restore_server(place.store, target)
    assert not target.exists()
