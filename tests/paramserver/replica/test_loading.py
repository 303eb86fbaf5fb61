"""How a copy begins from a running server: what is asked of the shards, and in which order; the server is made up."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from table_rows import ITEMS, USERS, chunk_of, snapshot

from headrace.paramserver.replica import identity_loading, loading
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.loading import load_live, load_snapshot
from headrace.paramserver.replica.log_hold import CopyLease
from headrace.paramserver.replica.memory_table import MemoryTable
from headrace.paramserver.snapshots.snapshot_files import verify_snapshot
from headrace.schemas.errors import CorruptionError, GoneError, UnavailableError
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=40, dim=1, dtype=DType.FLOAT32)


class Server:
    """One shard that tells what it was asked; its log may be removed when a row has been read."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.removed_at = -1
        self.clients: list[Any] = []
        self.links = [
            SimpleNamespace(hello=SimpleNamespace(server_id="s"), fetch_updates=self.fetch, address="nowhere")
        ]
        self._gone = asyncio.Event()

    async def status(self) -> list[Any]:
        table = SimpleNamespace(spec=spec_to_idl(SPEC))
        return [
            SimpleNamespace(shard=0, server_id="s", log_seq=7, accepted_seq=7, tables=[table], clients=self.clients)
        ]

    async def fetch(self, request: Any) -> Any:
        if self.asked and self.asked[-1] == self.removed_at:
            self._gone.set()
            raise GoneError("the log begins at seq 100")
        if request.from_seq == 8 and (request.wait_ms, request.max_bytes) == (0, 1) and "hold" not in self.asked:
            self.asked.append("hold")
        return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=7, mark_before=77)

    async def get_many(self, wanted: Any, *, with_versions: bool, timeout_s: float) -> Any:
        assert timeout_s >= 600, "a part may be long, and the link slow"
        ((_, ids),) = wanted
        self.asked.append(int(ids[0]))
        if self.asked[-1] == self.removed_at:
            await self._gone.wait()
        none = np.zeros(ids.size, np.int64)
        columns = {"weights": np.zeros((ids.size, 1), np.float32), "presence": none.astype(np.uint8)}
        return [SimpleNamespace(row_ids=ids, **columns, epochs=none, steps=none)]

    def told(self) -> None:
        self.asked.append("told")

    def load(self, on_progress: Callable[[], None] = lambda: None) -> Generation:
        lease = CopyLease(name="replica", copy_id="1", lease_s=0.001, is_lasting=True)
        return asyncio.run(
            load_live(cast("Any", self), is_by_step=False, make_table=MemoryTable, lease=lease, on_progress=on_progress)
        )


@pytest.fixture(autouse=True)
def _ten_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_LIVE_ROWS_AT_ONCE", 10)


def test_the_log_is_kept_while_rows_are_read() -> None:
    """A copy holds the log back, from the place that it will follow from, before its first read."""
    server = Server()
    (tail,) = server.load().tails
    assert server.asked == ["hold", 0, 10, 20, 30]
    assert (tail.seq, tail.begin_mark) == (7, 77)  # as the shard told before the first read


def test_each_part_that_has_come_is_progress() -> None:
    """Not the attempt to read the first: a server that never answers is not waited for without end."""
    server = Server()
    server.load(server.told)
    assert server.asked == ["hold", 0, "told", 10, "told", 20, "told", 30, "told"]


def test_a_log_that_has_gone_ends_the_reading() -> None:
    """No more rows are read when they could not be followed from any more."""
    server = Server()
    server.removed_at = 10
    with pytest.raises(GoneError):
        server.load()
    assert server.asked == ["hold", 0, 10]


def test_small_tables_are_read_together() -> None:
    """Up to so many rows and tables at once, each row of each table once, in order; a large table in pieces."""
    sizes = [3, 3, 4, 1, 25, 5, *[1] * 300]
    specs = [dataclasses.replace(SPEC, fqn=f"t{number}", num_rows=size) for number, size in enumerate(sizes)]
    parts = list(loading._live_parts(specs))
    rows_of_parts = [[int(ids.size) for _, ids in part] for part in parts]
    assert rows_of_parts[:5] == [[3, 3, 4], [1], [10], [10], [5, 5]]
    assert all(sum(rows) <= 10 for rows in rows_of_parts)
    found: dict[str, list[int]] = {}
    for spec, ids in (pair for part in parts for pair in part):
        found.setdefault(spec.fqn, []).extend(ids.tolist())
    assert found == {spec.fqn: list(range(spec.num_rows)) for spec in specs}


def test_wide_rows_are_read_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is some megabytes, whatever a row takes, so that each comes soon also over a slow link."""
    monkeypatch.setattr(loading, "_LIVE_ROWS_AT_ONCE", 65_536)
    sizes = {64: 40_000, 1 << 15: 70, 65_535: 3}
    specs = [dataclasses.replace(SPEC, fqn=str(dim), dim=dim, num_rows=num_rows) for dim, num_rows in sizes.items()]
    parts = [[(spec.dim, ids.size) for spec, ids in part] for part in loading._live_parts(specs)]
    wide = 1 << 15
    assert parts == [[(64, 16_384)], [(64, 16_384)], [(64, 7232)], [(wide, 32)], [(wide, 32)], [(wide, 6), (65_535, 3)]]
    assert all(sum(4 * dim * num_rows for dim, num_rows in part) <= 4 << 20 for part in parts)


def test_no_more_tables_are_read_together_than_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tables of one row the number is what bounds a part."""
    monkeypatch.setattr(loading, "_LIVE_ROWS_AT_ONCE", 65_536)
    specs = [dataclasses.replace(SPEC, fqn=f"t{number}", num_rows=1) for number in range(600)]
    assert [len(part) for part in loading._live_parts(specs)] == [256, 256, 88]


def test_writers_are_forgotten_in_the_order_of_the_shard() -> None:
    """A copy of a running shard keeps the order in which the shard has heard of its writers, whatever their epochs."""
    server = Server()
    columns = {"last_client_seq": 1, "step": 1, "is_connected": True, "rank": 0, "world_size": 1, "exact_step": 1}
    server.clients = [
        idl.ClientStatus(run=run, client="rank0", epoch=epoch, **columns, ended_client_seq=1)
        for run, epoch in (("b", 9), ("c", 4), ("a", 5))
    ]
    (tail,) = server.load().tails
    assert [session.run for session in tail._sessions] == ["b", "c", "a"]


def test_a_snapshot_that_nobody_wants_is_not_loaded_to_its_end() -> None:
    """The thread that loads looks every some rows whether it still should: nothing else can stop it."""
    layout = RecordLayout(SPEC, SPEC.whole)
    taken: list[int] = []

    def rows(fqn: str) -> Iterator[Any]:
        for first in range(0, 40, 10):
            taken.append(first)
            yield np.arange(first, first + 10), np.zeros(10, layout.dtype)

    def check() -> None:
        if len(taken) == 2:
            raise UnavailableError("the replica's copy is closed")

    table = MemoryTable(SPEC)
    with pytest.raises(UnavailableError):
        loading._load_table(cast("Any", SimpleNamespace(rows=rows)), table, check)
    assert taken == [0, 10] and table.num_present == 10


def test_identities_are_loaded_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a billion rows they take an hour: whoever gives the copy up meanwhile, or waits for it, is thought of."""
    chunk = chunk_of(USERS, range(40))
    folder = snapshot(tmp_path, {USERS: chunk}, num_shards=1)
    num_checked = []
    monkeypatch.setattr(identity_loading, "_ROWS_AT_ONCE", 10)
    generation = load_snapshot(
        folder,
        verify_snapshot(folder),
        is_by_step=False,
        make_table=lambda spec: MemoryTable(spec),
        check_wanted=lambda: num_checked.append(1),
    )
    assert len(num_checked) == 1 + 4  # the rows, and ten identities at a time
    assert chunk.identities is not None
    assert generation.identities[USERS.fqn].find(chunk.identities).tolist() == list(range(40))


def test_a_part_of_another_place_in_the_log_is_not_followed_from(tmp_path: Path) -> None:
    """A store that is not at the seq of its manifest is damage: what lies between would never come, or come again."""
    folder = snapshot(tmp_path, {ITEMS: chunk_of(ITEMS, range(20))}, num_shards=2)
    manifest = verify_snapshot(folder)

    def load(manifest: SnapshotManifest) -> Generation:
        return load_snapshot(
            folder, manifest, is_by_step=False, make_table=lambda spec: MemoryTable(spec), check_wanted=lambda: None
        )

    assert [tail.seq for tail in load(manifest).tails] == [part.seq for part in manifest.parts]
    for off in (-1, 1):
        parts = (manifest.parts[0], dataclasses.replace(manifest.parts[1], seq=manifest.parts[1].seq + off))
        with pytest.raises(CorruptionError, match=r"shard-0001.*the manifest says"):
            load(dataclasses.replace(manifest, parts=parts))
