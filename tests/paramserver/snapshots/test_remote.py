"""The client of snapshots against fake shards; `test_snapshot.py` covers whole snapshots."""

from __future__ import annotations

import asyncio
import errno
import itertools
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crc32c import crc32c
from virtual_loop import virtual

from headrace.paramserver.reading import link as shard_link
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.snapshots import remote
from headrace.paramserver.snapshots.directory import SnapshotFiles, verify_snapshot
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_snapshot, newest_snapshot
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
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile, SnapshotManifest

DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=10.0)


def _manifest(names: Sequence[str], size_bytes: int = 4, lease_s: int = 0) -> SnapshotManifest:
    files = tuple(SnapshotFile(name=name, size_bytes=size_bytes, crc32c=crc32c(b"abcd")) for name in names)
    part = ShardPart(shard=0, server_id="a", seq=3, epoch=1, step=2, tables=(), files=files)
    return SnapshotManifest(name="one", created_us=1, parts=(part,), lease_s=lease_s)


class Shard:
    """A shard that gives out a snapshot of files with the bytes `abcd`, two bytes at a time."""

    address = "somewhere:1"
    pieces_moved_s = -math.inf

    def __init__(self, *names: str, size_bytes: int = 4, lease_s: int = 0) -> None:
        self.manifest = _manifest(names or ["CURRENT"], size_bytes, lease_s).encode()
        self.manifest_piece_bytes = 1 << 20
        self.size_bytes = size_bytes
        self.asked: list[tuple[str, int]] = []  # name of the snapshot, offset in its manifest
        self.offsets: list[int] = []  # in files

    async def fetch_snapshot(self, request: Any) -> Any:
        at, name = request.offset, request.name or "one"
        if request.path:
            self.offsets.append(at)
            return idl.FetchSnapshotReply(name=name, data=memoryview(b"abcd"[at : at + 2]), size_bytes=self.size_bytes)
        self.asked.append((request.name, at))
        data = memoryview(self.manifest)[at : at + self.manifest_piece_bytes]
        return idl.FetchSnapshotReply(name="one", data=data, size_bytes=len(self.manifest))

    async def refresh(self) -> None:
        """Stay as it is."""

    close = refresh


@contextmanager
def serving(shard: Shard) -> Iterator[None]:
    """Let every link be to a shard, with short pauses between its attempts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "ShardLink", lambda *_, **__: shard)
        patch.setattr(shard_link, "_FIRST_PAUSE_S", 1e-9)
        yield


async def fetch(shard: Shard, to: Path, **settings: Any) -> SnapshotManifest:
    with serving(shard):
        return await fetch_snapshot("somewhere:1", to, dial=DIAL, **settings)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds on the clock that judges whether a shard is away."""
    now_s = [0.0]
    monkeypatch.setattr(shard_link, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


async def test_a_manifest_comes_in_pieces_of_one_snapshot() -> None:
    """The newest snapshot may be another one before the second piece, so later pieces are asked for by name."""
    shard = Shard()
    shard.manifest_piece_bytes = -(-len(shard.manifest) // 3)
    with serving(shard):
        assert (await newest_snapshot("somewhere:1", dial=DIAL)).name == "one"
    assert shard.asked == [(name, n * shard.manifest_piece_bytes) for n, name in enumerate(("", "one", "one"))]


@pytest.mark.parametrize(("claimed_bytes", "num_pieces"), [(6, 3), (1 << 40, 1)])
async def test_an_endless_manifest_is_refused(claimed_bytes: int, num_pieces: int) -> None:
    """A manifest that stops short, or claims an absurd size, is refused."""

    class Endless(Shard):
        async def fetch_snapshot(self, request: Any) -> Any:
            self.asked.append((request.name, request.offset))
            data = memoryview(b"{ un"[request.offset : request.offset + 2])
            return idl.FetchSnapshotReply(name="one", data=data, size_bytes=claimed_bytes)

    with serving(shard := Endless()), pytest.raises(CorruptionError, match="the manifest of snapshot 'one'"):
        await newest_snapshot("somewhere:1", dial=DIAL)
    assert len(shard.asked) == num_pieces


class Waited(Shard):
    """Answers once as many requests as allowed are waiting, or is away."""

    def __init__(self, *names: str, clock: list[float], away_s: float) -> None:
        super().__init__(*names)
        self.num_asked, self.clock, self.away_s = min(len(names), 8), clock, away_s
        self.num_waiting, self.is_full = 0, asyncio.Event()

    async def fetch_snapshot(self, request: Any) -> Any:
        if request.path:
            self.num_waiting += 1
            if self.num_waiting == self.num_asked:
                self.is_full.set()
            async with asyncio.timeout(60):
                await self.is_full.wait()
            self.clock[0] += self.away_s or 1000  # however long an answer takes
            if self.away_s:
                raise UnavailableError("no answer within 10 s")
        return await super().fetch_snapshot(request)


async def test_several_files_are_fetched_at_once(tmp_path: Path, clock: list[float]) -> None:
    """Round trips overlap; a slow link has unlimited time, a server that is away has one minute."""
    with pytest.raises(UnavailableError, match="no piece of snapshot 'one' for 60 s: no answer within 10 s"):
        await fetch(Waited("CURRENT", clock=clock, away_s=40.0), tmp_path / "away")
    names = [f"{number:06}.sst" for number in range(11)]
    seen: list[tuple[int, int]] = []
    await fetch(Waited(*names, clock=clock, away_s=0), tmp_path, on_progress=lambda *of: seen.append(of))
    assert seen == [(2 * number, 44) for number in range(1, 23)]  # one call per piece
    folder = tmp_path / "one" / "shard-0000"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == dict.fromkeys(names, b"abcd")


async def test_a_breaking_link_that_makes_progress_is_not_away(tmp_path: Path, clock: list[float]) -> None:
    """A piece that makes progress before each break has unlimited time."""

    class Breaking(Shard):
        num_breaks = 5

        async def fetch_snapshot(self, request: Any) -> Any:
            if request.path and self.num_breaks:
                self.num_breaks -= 1
                clock[0] += 40.0
                self.pieces_moved_s = clock[0]
                raise UnavailableError("the connection broke")
            return await super().fetch_snapshot(request)

    await fetch(Breaking(), tmp_path)
    assert (tmp_path / "one/shard-0000/CURRENT").read_bytes() == b"abcd"


@pytest.mark.parametrize(
    ("before", "offsets", "told"),
    [
        pytest.param(None, [0, 2], [2, 4], id="nothing"),
        pytest.param(b"ab", [2], [2, 4], id="half"),
        pytest.param(b"abcd", [], [4], id="whole"),
        pytest.param(b"abXd", [0, 2], [4, 4, 4], id="damaged"),
        pytest.param(b"aX", [2, 0, 2], [2, 4, 4, 4], id="damaged half"),
        pytest.param(b"abcde", [0, 2], [4, 4, 4], id="longer"),
    ],
)
async def test_only_missing_bytes_are_fetched_and_count_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes | None, offsets: list[int], told: list[int]
) -> None:
    """Bytes of an earlier call are fetched again only if they are wrong; file and name are synced."""
    target = SnapshotFiles(tmp_path).new_folder("one") / "shard-0000" / "CURRENT"
    if before is not None:
        target.parent.mkdir(parents=True)
        target.write_bytes(before)
    synced: list[tuple[Path, bool]] = []
    monkeypatch.setattr(remote, "fsync_path", lambda path: synced.append((path, target.read_bytes() == b"abcd")))
    seen: list[tuple[int, int]] = []
    await fetch(shard := Shard(), tmp_path, on_progress=lambda *of: seen.append(of))
    assert shard.offsets == offsets
    assert seen == [(done, 4) for done in told]
    assert synced == [(target, True), (target.parent, True)]


async def test_a_copy_has_no_lease_and_its_name(tmp_path: Path) -> None:
    """A copy of an export's snapshot is never pruned, and not fetched again; another one of that name is refused."""
    shard, files = Shard(lease_s=3600), SnapshotFiles(tmp_path)
    for _ in range(2):
        assert await fetch(shard, tmp_path) == _manifest(["CURRENT"]) == verify_snapshot(tmp_path / "one")
    assert shard.offsets == [0, 2]
    os.utime(tmp_path / "one", (0, 0))
    assert files.prune_abandoned() == () and files.newest() == _manifest(["CURRENT"])
    with pytest.raises(ConfigError, match="one is another snapshot of that name: remove it, or fetch elsewhere"):
        await fetch(Shard("OTHER"), tmp_path)
    assert verify_snapshot(tmp_path / "one") == _manifest(["CURRENT"])


async def test_a_lack_of_room_for_the_rest_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier call has fetched needs no room."""
    target = SnapshotFiles(tmp_path).new_folder("one") / "shard-0000" / "CURRENT"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"abc")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StorageError, match="the rest of snapshot 'one' takes"):
        await fetch(Shard(), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    await fetch(Shard(), tmp_path)


async def test_a_file_that_cannot_be_synced_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync is a storage error that names the file."""

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(remote, "fsync_path", fail)
    with pytest.raises(StorageError, match="shard-0000/CURRENT: Input/output error"):
        await fetch(Shard(), tmp_path)


@pytest.mark.parametrize("is_removed", [True, False])
async def test_only_a_removed_snapshot_leaves_no_partial_copy(tmp_path: Path, is_removed: bool) -> None:
    """A caller that gives up can resume later; a snapshot that is gone leaves nothing."""
    shard = Shard()

    async def refuse(request: Any) -> Any:
        raise GoneError("there is no snapshot 'one'")

    def give_up(done: int, total: int) -> None:
        if not is_removed:
            raise GoneError("the log behind it is gone")
        shard.fetch_snapshot = refuse  # type: ignore[method-assign]

    with pytest.raises(GoneError, match="there is no snapshot" if is_removed else "the log behind it"):
        await fetch(shard, tmp_path, on_progress=give_up)
    assert SnapshotFiles(tmp_path).new_folder("one").exists() is not is_removed


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_an_error_does_not_replace_a_cancellation(tmp_path: Path, is_cancelled: bool) -> None:
    """A cancelled fetch ends as cancelled whatever fails meanwhile, and an error is not a cancellation."""
    asked, goes_on = asyncio.Event(), asyncio.Event()

    class Failing(Shard):
        async def fetch_snapshot(self, request: Any) -> Any:
            if not request.path:
                return await super().fetch_snapshot(request)
            asked.set()
            try:
                await goes_on.wait()
            finally:
                raise StorageError("the disk is on fire")

    fetching = asyncio.create_task(fetch(Failing(), tmp_path))
    await asked.wait()
    if is_cancelled:
        fetching.cancel()
    else:
        goes_on.set()
    with pytest.raises(asyncio.CancelledError if is_cancelled else StorageError):
        await fetching
    assert fetching.cancelling() == is_cancelled  # a rest would look like a cancellation to a deadline around it


async def test_a_file_that_stops_short_is_refused(tmp_path: Path) -> None:
    """The error names file and byte; the partial copy stays."""
    shard = Shard(size_bytes=6)
    with pytest.raises(CorruptionError, match="shard-0000/CURRENT of snapshot 'one' ends at 4 bytes"):
        await fetch(shard, tmp_path)
    assert shard.offsets == [0, 2, 4]
    assert (SnapshotFiles(tmp_path).new_folder("one") / "shard-0000" / "CURRENT").read_bytes() == b"abcd"


async def test_a_resumed_fetch_is_not_pruned(tmp_path: Path) -> None:
    """A fetch that is resumed after days counts as active from its first moment, even if it only reads."""
    files, shard = SnapshotFiles(tmp_path), Shard()

    def stop(done: int, total: int) -> None:
        if done == total:
            raise StorageError("the caller has enough")

    with pytest.raises(StorageError, match="enough"):
        await fetch(shard, tmp_path, on_progress=stop)
    target = files.new_folder("one") / "shard-0000" / "CURRENT"
    for path in (target, *target.parents[:2]):
        os.utime(path, (0, 0))
    await fetch(shard, tmp_path, on_progress=lambda *_: files.prune_abandoned())
    assert (files.folder_of("one") / "shard-0000" / "CURRENT").read_bytes() == b"abcd"
    assert shard.offsets == [0, 2]


@pytest.mark.parametrize("name", ["", "shard-0000", "shard-0000/CURRENT", "at the end"])
async def test_a_fetch_whose_files_are_removed_is_a_storage_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part disappears, and if only publishing finds it, the error is that of a failed disk."""
    folder = SnapshotFiles(tmp_path).new_folder("one")
    path, publish = folder / name.removeprefix("at the end"), SnapshotFiles.publish

    def remove(done: int, total: int) -> None:
        if done == total and name != "at the end":
            path.unlink() if path.is_file() else shutil.rmtree(path)

    def publish_what_is_gone(files: SnapshotFiles, manifest: SnapshotManifest) -> None:
        shutil.rmtree(path)
        path.rename(files.folder_of(manifest.name))

    monkeypatch.setattr(SnapshotFiles, "publish", publish_what_is_gone if name == "at the end" else publish)
    with pytest.raises(StorageError, match=r"(CURRENT|\.new-one): No such file or directory"):
        await fetch(Shard(), tmp_path, on_progress=remove)


class Running:
    """A shard of a run that is always some steps beyond the requested one; it has another writer, too."""

    address, host = "somewhere:1", "somewhere"

    def __init__(
        self, shard: int, *, beyond: int = 0, errors: Sequence[HeadraceError] = (), takes_s: float = 0
    ) -> None:
        self.shard, self.beyond, self.errors, self.takes_s = shard, beyond, [*errors], takes_s
        self.min_steps: list[int] = []
        self.calls: Counter[str] = Counter()

    async def status(self) -> Any:
        client = idl.ClientStatus(run="run", client="rank0", epoch=3, step=10 - self.shard, world_size=1)
        other = idl.ClientStatus(run="fill", client="log", epoch=9, step=70, world_size=0)
        return idl.StatusReply(clients=[client, other])

    async def create_snapshot(self, request: Any) -> Any:
        assert request.epoch == 3
        self.min_steps.append(request.min_step)
        await asyncio.sleep(self.takes_s)
        if self.errors:
            raise self.errors.pop(0)
        step = request.min_step + self.beyond
        part = ShardPart(shard=self.shard, server_id="s", seq=1, epoch=3, step=step, tables=(), files=())
        return idl.CreateSnapshotReply(part=part.encode())

    async def finish_snapshot(self, request: Any) -> Any:
        self.calls["discard" if request.manifest is None else "publish"] += 1
        return idl.FinishSnapshotReply()

    async def close(self) -> None:
        """Stay open."""


async def create(*shards: Running, timeout_s: float = 60.0, **settings: Any) -> SnapshotManifest:
    """Make a snapshot of shards in virtual time."""

    async def link_all(*_: Any) -> Any:
        return list(shards)

    clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time, time_ns=time.time_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "time", clock)
        patch.setattr(remote, "link_all", link_all)
        return await create_snapshot("somewhere:1", dial=DIAL, name="one", timeout_s=timeout_s, **settings)


@virtual
async def test_shards_at_one_step_make_a_snapshot() -> None:
    """The first attempt with all shards at one step is published by one of them; then none keeps log for it."""
    shards = Running(0, beyond=2), Running(1, beyond=2)
    manifest = await create(*shards, run="run")
    assert [(part.shard, part.step) for part in manifest.parts] == [(0, 12), (1, 12)]
    assert [shard.calls for shard in shards] == [{"publish": 1, "discard": 1}, {"discard": 1}]


@virtual
async def test_shards_that_never_agree_on_a_step_make_no_snapshot() -> None:
    """Each attempt asks for a later step and is discarded if the shards differ, until the deadline."""
    shards = Running(0, takes_s=12), Running(1, beyond=1, takes_s=12)
    with pytest.raises(UnavailableError, match="did not agree on a step in time"):
        await create(*shards, timeout_s=250)  # ten seconds of each attempt are the run's
    ahead = list(itertools.accumulate(range(24), lambda last, _: min(2 * last + 1, 1 << 20), initial=0))
    assert shards[0].min_steps == shards[1].min_steps == [10 + steps for steps in ahead]
    assert [shard.calls for shard in shards] == [{"discard": 25}] * 2  # else each would keep log for its part


@virtual
async def test_a_late_run_gets_the_same_step_again() -> None:
    """After a late attempt the requested step stays, because the run may have stopped there."""
    late = [UnavailableError("amid a step"), OverloadedError("another snapshot is being made")]
    shards = Running(0), Running(1, errors=late)
    assert (await create(*shards)).step == 10
    assert shards[0].min_steps == shards[1].min_steps == [10, 10, 10]
    assert shards[0].calls["discard"] == 2 + 1


@virtual
async def test_hashing_does_not_count_against_the_deadline() -> None:
    """The deadline is for the run to reach a step; the rest of a call extends it."""

    class Hashing(Running):
        async def create_snapshot(self, request: Any) -> Any:
            assert request.wait_ms == 10_000
            self.beyond = self.shard if len(self.min_steps) < 4 else 0
            return await super().create_snapshot(request)

    shards = Hashing(0, takes_s=500), Hashing(1, takes_s=500)
    await create(*shards, timeout_s=50)
    assert len(shards[0].min_steps) == 5


@virtual
async def test_a_shard_that_is_away_is_named_at_the_end() -> None:
    """A shard that refuses at once is asked again after a pause, and its error is the one that is raised."""
    shards = Running(0), Running(1, errors=[UnavailableError("no connection to b:1")] * 100)
    with pytest.raises(UnavailableError, match="no connection to b:1"):
        await create(*shards, timeout_s=0.9)
    assert len(shards[0].min_steps) == 6


@pytest.mark.parametrize("hangs", [False, True])
@virtual
async def test_a_permanent_error_ends_the_attempts_and_discards_all_parts(hangs: bool) -> None:
    """However far the deadline: else the others keep log for a day. A shard that hangs does not block the caller."""

    class Made(Running):
        async def finish_snapshot(self, request: Any) -> Any:
            await super().finish_snapshot(request)
            await asyncio.sleep(1e9 if hangs else 0)

    shards = Running(0, errors=[StorageError("the disk is on fire")]), Made(1)
    with pytest.raises(StorageError, match="on fire"):
        await create(*shards, timeout_s=1e9)
    assert shards[0].min_steps == [10]
    assert [shard.calls for shard in shards] == [{"discard": 1}] * 2


@virtual
async def test_a_snapshot_for_one_reader_is_made_on_one_host() -> None:
    """One with a lease stays on disk; over several hosts it is refused before any shard is asked."""
    shards = Running(0), Running(1)
    shards[1].host = "ps-b"
    with pytest.raises(ConfigError, match=r"on several hosts, and no disk there has all of a snapshot: make one in an"):
        await create(*shards, lease_s=60)
    assert [shard.min_steps for shard in shards] == [[], []]
