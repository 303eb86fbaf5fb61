"""The client of snapshots against fake shards; `test_snapshot.py` covers whole snapshots."""

from __future__ import annotations

import asyncio
import errno
import itertools
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from headrace.paramserver.reading import link as shard_link
from headrace.paramserver.reading.link import Dial, ShardLink
from headrace.paramserver.snapshots import remote
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.snapshots.remote import (
    _fetch_file,
    _fetch_files,
    _fetch_manifest,
    _make_parts,
    create_snapshot,
    fetch_snapshot,
)
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    OverloadedError,
    StorageError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile, SnapshotManifest


class _Pieces:
    """A shard that has the first bytes of a file and claims more."""

    address = "somewhere:1"
    pieces_moved_s = -math.inf

    def __init__(self, data: bytes, *, size_bytes: int) -> None:
        self.data, self.size_bytes = data, size_bytes
        self.offsets: list[int] = []
        self.names: list[str] = []

    async def fetch_snapshot(self, request: Any) -> Any:
        self.offsets.append(request.offset)
        self.names.append(request.name)
        data = self.data[request.offset : request.offset + 2]
        return idl.FetchSnapshotReply(name="one", data=memoryview(data), size_bytes=self.size_bytes)


@pytest.mark.parametrize(("size_bytes", "offsets"), [(6, [0, 2, 4]), (1 << 40, [0])])
async def test_an_endless_manifest_is_refused(size_bytes: int, offsets: list[int]) -> None:
    """A manifest that stops short, or claims an absurd size, is refused."""
    link = _Pieces(b"{ un", size_bytes=size_bytes)
    with pytest.raises(CorruptionError, match="the manifest of snapshot 'one' is incomplete"):
        await _fetch_manifest(link, "one")  # type: ignore[arg-type]
    assert link.offsets == offsets


async def test_a_manifest_comes_in_pieces() -> None:
    """A manifest longer than a piece is assembled, all of it from one snapshot."""
    link = _Pieces(b"{ it is }", size_bytes=9)
    assert await _fetch_manifest(link, "") == b"{ it is }"  # type: ignore[arg-type]
    assert link.offsets == [0, 2, 4, 6, 8]
    assert link.names == ["", *["one"] * 4]  # the newest may change before the second piece


def _manifest(names: Sequence[str]) -> SnapshotManifest:
    files = tuple(SnapshotFile(name=name, size_bytes=4, crc32c=crc32c(b"abcd")) for name in names)
    part = ShardPart(shard=0, server_id="a", seq=3, epoch=1, step=2, tables=(), files=files)
    return SnapshotManifest(name="one", created_us=1, parts=(part,))


class _Waited(_Pieces):
    """A shard that answers once as many requests as allowed are waiting, or is away."""

    def __init__(self, *, num_asked: int, clock: list[float], away_s: float) -> None:
        super().__init__(b"abcd", size_bytes=4)
        self.num_asked, self.clock, self.away_s = num_asked, clock, away_s
        self.num_waiting = 0
        self.is_full = asyncio.Event()

    async def fetch_snapshot(self, request: Any) -> Any:
        self.num_waiting += 1
        if self.num_waiting == self.num_asked:
            self.is_full.set()
        async with asyncio.timeout(60):
            await self.is_full.wait()
        if self.away_s:
            self.clock[0] += self.away_s
            raise UnavailableError("no answer within 10 s")
        self.clock[0] += 1000  # however long an answer takes
        return await super().fetch_snapshot(request)


@pytest.mark.parametrize(("num_files", "away_s"), [(11, 0.0), (1, 40.0)])
async def test_several_files_are_fetched_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int, away_s: float
) -> None:
    """Round trips overlap; a slow link has unlimited time, a server that is away has one minute."""
    clock = [0.0]
    monkeypatch.setattr(shard_link, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(shard_link, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(shard_link, "_LONGEST_PAUSE_S", 0.001)
    names = [f"{number:06}.sst" for number in range(num_files)]
    manifest = _manifest(names)
    link, files = _Waited(num_asked=min(num_files, 8), clock=clock, away_s=away_s), SnapshotFiles(tmp_path)
    if away_s:
        with pytest.raises(UnavailableError, match="no piece of snapshot 'one' for 60 s: no answer within 10 s"):
            await _fetch_files(link, manifest, files, None)  # type: ignore[arg-type]
        return
    seen: list[tuple[int, int]] = []
    await _fetch_files(link, manifest, files, lambda *of: seen.append(of))  # type: ignore[arg-type]
    assert seen == [(2 * number, 44) for number in range(1, 23)]  # one call per piece
    folder = files.new_folder("one") / "shard-0000"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(names, b"abcd")


async def test_a_breaking_link_that_makes_progress_is_not_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that makes progress before each break has unlimited time."""
    clock = [0.0]
    monkeypatch.setattr(shard_link, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(shard_link, "_FIRST_PAUSE_S", 1e-9)

    class Breaking(_Pieces):
        num_breaks = 5

        async def fetch_snapshot(self, request: Any) -> Any:
            if self.num_breaks:
                self.num_breaks -= 1
                clock[0] += 40.0
                self.pieces_moved_s = clock[0]
                raise UnavailableError("the connection broke")
            return await super().fetch_snapshot(request)

    link, file = Breaking(b"abcd", size_bytes=4), SnapshotFile(name="CURRENT", size_bytes=4, crc32c=crc32c(b"abcd"))
    await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path, lambda _: None)  # type: ignore[arg-type]
    assert (tmp_path / "shard-0000/CURRENT").read_bytes() == b"abcd"


@pytest.mark.parametrize(
    ("before", "told"),
    [(b"ab", [2, 4]), (b"abcd", [4]), (b"abXd", [4, 4, 4]), (b"aX", [2, 4, 4, 4]), (b"abcdefgh", [4, 4, 4])],
    ids=["half", "whole", "damaged", "damaged half", "longer"],
)
async def test_bytes_count_once_even_if_fetched_again(tmp_path: Path, before: bytes, told: list[int]) -> None:
    """Resumed bytes count at once, and repeated pieces report progress without exceeding the total."""
    link, files = _Pieces(b"abcd", size_bytes=4), SnapshotFiles(tmp_path)
    target = files.new_folder("one") / "shard-0000" / "CURRENT"
    target.parent.mkdir(parents=True)
    target.write_bytes(before)
    seen: list[tuple[int, int]] = []
    await _fetch_files(link, _manifest(["CURRENT"]), files, lambda *of: seen.append(of))  # type: ignore[arg-type]
    assert seen == [(done, 4) for done in told]


@pytest.mark.parametrize("is_removed", [True, False])
async def test_only_a_removed_snapshot_leaves_no_partial_copy(tmp_path: Path, is_removed: bool) -> None:
    """A caller that gives up can resume later; a snapshot that is gone leaves nothing."""
    link, files = _Pieces(b"abcd", size_bytes=4), SnapshotFiles(tmp_path)

    async def refuse(request: Any) -> Any:
        raise GoneError("there is no snapshot 'one'")

    def give_up(done: int, total: int) -> None:
        if is_removed:
            link.fetch_snapshot = refuse  # type: ignore[method-assign]
        else:
            raise GoneError("the log behind it is gone")

    with pytest.raises(GoneError, match="there is no snapshot" if is_removed else "the log behind it"):
        await _fetch_files(link, _manifest(["CURRENT"]), files, give_up)  # type: ignore[arg-type]
    assert files.new_folder("one").exists() is not is_removed


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_an_error_does_not_replace_a_cancellation(tmp_path: Path, is_cancelled: bool) -> None:
    """A cancelled fetch ends as cancelled whatever fails meanwhile, and an error is not a cancellation."""
    asked, goes_on = asyncio.Event(), asyncio.Event()

    class Failing(_Pieces):
        async def fetch_snapshot(self, request: Any) -> Any:
            asked.set()
            try:
                await goes_on.wait()
            finally:
                raise StorageError("the disk is on fire")

    link = Failing(b"abcd", size_bytes=4)
    fetching = asyncio.create_task(_fetch_files(link, _manifest(["CURRENT"]), SnapshotFiles(tmp_path), None))  # type: ignore[arg-type]
    await asked.wait()
    if is_cancelled:
        fetching.cancel()
    else:
        goes_on.set()
    with pytest.raises(asyncio.CancelledError if is_cancelled else StorageError):
        await fetching
    assert fetching.cancelling() == is_cancelled  # a rest would look like a cancellation to a deadline around it


async def test_a_closed_link_is_not_reported_as_away() -> None:
    """A closed reader fails at once and says so."""
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=1.0)
    link = ShardLink(dial, "127.0.0.1", 1)
    await link.close()
    with pytest.raises(UnavailableError, match=r"^the reader is closed$"):
        await _fetch_manifest(link, "one")


async def test_a_file_that_stops_short_is_refused(tmp_path: Path) -> None:
    """The error names file and byte; the partial copy stays."""
    link = _Pieces(b"abcd", size_bytes=6)
    file = SnapshotFile(name="CURRENT", size_bytes=6, crc32c=0)
    with pytest.raises(CorruptionError, match="shard-0000/CURRENT of snapshot 'one' ends at 4 bytes"):
        await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path, lambda _: None)  # type: ignore[arg-type]
    assert link.offsets == [0, 2, 4]
    assert (tmp_path / "shard-0000" / "CURRENT").read_bytes() == b"abcd"


@pytest.mark.parametrize(
    ("before", "offsets"),
    [(None, [0, 2]), (b"ab", [2]), (b"abcd", []), (b"abXd", [0, 2]), (b"abcde", [0, 2])],
    ids=["nothing", "half", "whole", "damaged", "longer"],
)
async def test_only_missing_bytes_are_fetched_and_all_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None, offsets: list[int]
) -> None:
    """Bytes of an earlier call are fetched again only if they are wrong; file and name are synced."""
    target = tmp_path / "shard-0000" / "CURRENT"
    if before is not None:
        target.parent.mkdir()
        target.write_bytes(before)
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(remote, "fsync_path", lambda path: synced.append((path, target.read_bytes() == b"abcd")))
    link, file = _Pieces(b"abcd", size_bytes=4), SnapshotFile(name="CURRENT", size_bytes=4, crc32c=crc32c(b"abcd"))
    await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path, lambda _: None)  # type: ignore[arg-type]
    assert link.offsets == offsets
    assert synced == [(target, True), (target.parent, True)]


async def test_a_file_that_cannot_be_synced_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync is a storage error that names the file."""

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(remote, "fsync_path", fail)
    link, file = _Pieces(b"abcd", size_bytes=4), SnapshotFile(name="CURRENT", size_bytes=4, crc32c=crc32c(b"abcd"))
    with pytest.raises(StorageError, match="shard-0000/CURRENT: Input/output error"):
        await _fetch_file(link, "one", "shard-0000/CURRENT", file, tmp_path, lambda _: None)  # type: ignore[arg-type]


async def test_a_resumed_fetch_is_not_pruned(tmp_path: Path) -> None:
    """A fetch that is resumed after days counts as active from its first moment, even if it only reads."""
    files, link = SnapshotFiles(tmp_path), _Pieces(b"abcd", size_bytes=4)
    await _fetch_files(link, _manifest(["CURRENT"]), files, None)  # type: ignore[arg-type]
    target = files.new_folder("one") / "shard-0000" / "CURRENT"
    for path in (target, *target.parents[:2]):
        os.utime(path, (0, 0))
    await _fetch_files(link, _manifest(["CURRENT"]), files, lambda *_: files.prune_abandoned())  # type: ignore[arg-type]
    assert target.read_bytes() == b"abcd"
    assert link.offsets == [0, 2]


@pytest.mark.parametrize("name", ["", "shard-0000", "shard-0000/CURRENT"])
async def test_a_fetch_whose_files_are_removed_is_a_storage_error(tmp_path: Path, name: str) -> None:
    """Whatever part disappears, the error is that of a failed disk."""
    files, link = SnapshotFiles(tmp_path), _Pieces(b"abcd", size_bytes=4)
    path = files.new_folder("one") / name

    def remove(done: int, total: int) -> None:
        if done == total:
            path.unlink() if path.is_file() else shutil.rmtree(path)

    with pytest.raises(StorageError, match="shard-0000/CURRENT: No such file or directory"):
        await _fetch_files(link, _manifest(["CURRENT"]), files, remove)  # type: ignore[arg-type]


async def test_a_fetch_whose_folder_is_removed_at_the_end_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same if publishing finds it."""
    data = _manifest(["CURRENT"]).encode()
    link = SimpleNamespace(address="somewhere:1", pieces_moved_s=-math.inf)

    async def nothing() -> None:
        pass

    async def piece(request: Any) -> Any:
        piece = b"abcd" if request.path else data
        return idl.FetchSnapshotReply(name="one", data=memoryview(piece), size_bytes=len(piece))

    def publish(files: SnapshotFiles, manifest: SnapshotManifest) -> None:
        shutil.rmtree(files.new_folder(manifest.name))
        files.new_folder(manifest.name).rename(files.folder_of(manifest.name))

    link.refresh = link.close = nothing
    link.fetch_snapshot = piece
    monkeypatch.setattr(remote, "ShardLink", lambda *_, **__: link)
    monkeypatch.setattr(SnapshotFiles, "publish", publish)
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=1.0)
    with pytest.raises(StorageError, match=r"\.new-one: No such file or directory"):
        await fetch_snapshot("somewhere:1", tmp_path, dial=dial)


class _Running:
    """A shard of a run that is always some steps beyond the requested one; it has another writer, too."""

    address, host = "somewhere:1", "somewhere"

    def __init__(self, shard: int, *, beyond: int, errors: Sequence[HeadraceError] = ()) -> None:
        self.shard, self.beyond, self.errors = shard, beyond, [*errors]
        self.min_steps: list[int] = []
        self.num_discarded = 0

    async def status(self) -> Any:
        client = idl.ClientStatus(run="run", client="rank0", epoch=3, step=10 - self.shard, world_size=1)
        other = idl.ClientStatus(run="replay", client="log", epoch=9, step=70, world_size=0)
        return idl.StatusReply(clients=[client, other])

    async def create_snapshot(self, request: Any) -> Any:
        assert request.epoch == 3
        self.min_steps.append(request.min_step)
        if self.errors:
            raise self.errors.pop(0)
        step = request.min_step + self.beyond
        part = ShardPart(shard=self.shard, server_id="s", seq=1, epoch=3, step=step, tables=(), files=())
        return idl.CreateSnapshotReply(part=part.encode())

    async def finish_snapshot(self, request: Any) -> Any:
        self.num_discarded += 1
        return idl.FinishSnapshotReply()

    async def close(self) -> None:
        """Stay open."""


async def test_shards_that_never_agree_on_a_step_make_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt asks for a later step and is discarded if the shards differ, until the deadline."""
    clock = [0.0]
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Passing(_Running):
        async def create_snapshot(self, request: Any) -> Any:
            clock[0] += 1.0
            return await super().create_snapshot(request)

    links = [Passing(0, beyond=0), Passing(1, beyond=1)]
    with pytest.raises(UnavailableError, match="did not agree on a step in time"):
        await _make_parts(links, "one", None, True, 50.0)  # type: ignore[arg-type]
    ahead = list(itertools.accumulate(links[0].min_steps[1:], lambda last, _: min(2 * last + 1, 1 << 20), initial=0))
    assert links[0].min_steps == links[1].min_steps == [10 + steps for steps in ahead]
    assert len(ahead) == 25  # the last ones ask as far ahead as allowed
    assert [link.num_discarded for link in links] == [len(ahead) - 1] * 2  # else each shard would keep log for its part


async def test_a_late_run_gets_the_same_step_again() -> None:
    """After a late attempt the requested step stays, because the run may have stopped there."""
    late = [UnavailableError("amid a step"), OverloadedError("another snapshot is being made")]
    links = [_Running(0, beyond=0), _Running(1, beyond=0, errors=late)]
    parts = await _make_parts(links, "one", None, True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert [part.step for part in parts] == [10, 10]
    assert links[0].min_steps == links[1].min_steps == [10, 10, 10]
    assert links[0].num_discarded == 2


@pytest.mark.parametrize("is_written", [True, False])
async def test_a_shard_without_partitions_has_to_be_at_the_step_while_it_is_written_to(is_written: bool) -> None:
    """Rows that it refused come to other shards before it ends their step, perhaps behind these shards' own ends."""
    moved = PartitionMap.first(2).moved(np.arange(1, 1024, 2), np.ones(512, np.int64), 0)

    class Moved(_Running):
        async def status(self) -> Any:
            reply = await super().status()
            reply.partitions = moved.encode()
            reply.clients = reply.clients if is_written or not self.shard else reply.clients[1:]
            return reply

    links = [Moved(0, beyond=0), Moved(1, beyond=1)]
    if is_written:
        with pytest.raises(UnavailableError, match="did not agree on a step in time"):
            await _make_parts(links, "one", None, True, 0.0)  # type: ignore[arg-type]
        links[1].beyond = 0
    parts = await _make_parts(links, "one", None, True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert [part.step for part in parts] == [10, 10 + (not is_written)]


@pytest.mark.parametrize("hashing_s", [5000.0, 5.0])
async def test_hashing_does_not_count_against_the_deadline(monkeypatch: pytest.MonkeyPatch, hashing_s: float) -> None:
    """The deadline is for the run to reach a step; the rest of a call extends it."""
    clock = [0.0]
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Hashing(_Running):
        async def create_snapshot(self, request: Any) -> Any:
            assert request.wait_ms in (10_000, 5_000)
            clock[0] += hashing_s
            self.beyond = self.shard if len(self.min_steps) < 4 else 0
            return await super().create_snapshot(request)

    links = [Hashing(0, beyond=0), Hashing(1, beyond=1)]
    if hashing_s < 10:  # two shards, ten seconds an attempt
        with pytest.raises(UnavailableError, match="did not agree on a step in time"):
            await _make_parts(links, "one", None, True, 35.0)  # type: ignore[arg-type]
        return
    parts = await _make_parts(links, "one", None, True, 60.0)  # type: ignore[arg-type]
    assert len({part.step for part in parts}) == 1
    assert len(links[0].min_steps) == 5


async def test_a_shard_that_is_away_is_named_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that refuses at once is asked again after a pause, and its error is the one that is raised."""
    clock = [0.0]

    async def pause(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(asyncio, "sleep", pause)
    links = [_Running(0, beyond=0), _Running(1, beyond=0, errors=[UnavailableError("no connection to b:1")] * 100)]
    with pytest.raises(UnavailableError, match="no connection to b:1"):
        await _make_parts(links, "one", None, True, 4.5 * remote._PAUSE_S)  # type: ignore[arg-type]
    assert len(links[0].min_steps) == 6


async def test_a_permanent_error_ends_the_attempts() -> None:
    """A permanent error is raised at once, however far the deadline."""
    links = [_Running(0, beyond=0), _Running(1, beyond=0, errors=[StorageError("the disk is on fire")])]
    with pytest.raises(StorageError, match="on fire"):
        await _make_parts(links, "one", None, True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert links[0].min_steps == [10]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_part_that_fails_is_discarded_on_all_shards(monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    """Else the others would keep log for a day; a shard that hangs does not block the caller."""

    class Made(_Running):
        async def finish_snapshot(self, request: Any) -> Any:
            reply = await super().finish_snapshot(request)
            if hangs:
                await asyncio.Event().wait()
            return reply

    made = Made(1, beyond=0)
    links = [_Running(0, beyond=0, errors=[StorageError("the disk is on fire")]), made]

    async def connect(dial: Dial, seeds: Any) -> Any:
        return links

    monkeypatch.setattr(remote, "link_all", connect)
    monkeypatch.setattr(remote, "_DISCARD_S", 0.01 if hangs else 20.0)
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0)
    async with asyncio.timeout(60):
        with pytest.raises(StorageError, match="on fire"):
            await create_snapshot("somewhere", dial=dial, name="one", timeout_s=60)
    assert [link.num_discarded for link in links] == [1, 1]


async def test_shards_at_one_step_make_a_snapshot() -> None:
    """The first attempt with all shards at one step is used, and none of it is discarded."""
    links = [_Running(0, beyond=2), _Running(1, beyond=2)]
    parts = await _make_parts(links, "one", "run", True, time.monotonic() + 60)  # type: ignore[arg-type]
    assert [(part.shard, part.step) for part in parts] == [(0, 12), (1, 12)]
    assert [link.num_discarded for link in links] == [0, 0]


async def test_a_snapshot_for_one_reader_is_made_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a lease stays on disk; over several hosts it is refused before any shard is asked."""
    links = [_Running(0, beyond=2), _Running(1, beyond=2)]
    links[0].host, links[1].host = "ps-a", "ps-b"

    async def link_all(*_: Any) -> list[_Running]:
        return links

    monkeypatch.setattr(remote, "link_all", link_all)
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"on several hosts, and no disk there has all of a snapshot: make one in an"):
        await create_snapshot("somewhere:1", dial=dial, name="one", timeout_s=1.0, lease_s=60)
    assert [link.min_steps for link in links] == [[], []]
