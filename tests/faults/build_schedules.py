"""Seeded schedules of builds: a server with another number of shards takes a server's place, while hand-overs go on.

    python tests/faults/build_schedules.py --schedules 20000 --seed 1 --jobs 2

As `hand_over_schedules.py`, without claims and forced promotions. A builder is killed and begins anew until its server
is published; then that is served, and the old one names it to everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support")]

from hand_over_schedules import ADMIN_DIAL, SPEC, HandOverSchedule, read_rows
from host_loop import Host, host_here
from simulated_servers import DiskLog, SimulatedServer, World
from simulated_servers import surroundings as of_servers
from simulator import Finding, main

from headrace.paramserver.config.data_dir import MANIFEST_NAME, Manifest, find_manifest
from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO
from headrace.paramserver.reshard import new_shards
from headrace.paramserver.reshard.new_server import build_server
from headrace.paramserver.shard.service import Shard
from headrace.paramserver.snapshots import contents
from headrace.paramserver.snapshots.new_data_dir import FIRST_SEQ, NewDataDir
from headrace.paramserver.store import rows as row_store
from headrace.paramserver.store.catalog import Catalog, pack_spec
from headrace.paramserver.store.coalescing import SortedRun
from headrace.schemas.errors import HeadraceError, ReshardedError
from headrace.schemas.predecessors import Predecessor
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.snapshot_manifest import shard_folder
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["BuildSchedule"]


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """As those of servers, with stores of builders in memory."""
    with of_servers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_shards, "StoreBuilder", _MemoryStoreBuilder)
        patch.setattr(contents, "TableFileReader", _NoTableFiles)
        yield


class _NoTableFiles:
    """What a snapshot's reader takes for its reader of RocksDB's files: rows come from the store instead."""

    @classmethod
    def open(cls, path: Path) -> None:
        return None


class BuildSchedule(HandOverSchedule):
    """One seed: as of hand-overs, and a builder."""

    surroundings = surroundings
    chance_of_claims: ClassVar[float] = 0.0
    may_lose: ClassVar[bool] = False

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.build = _Build(self)

    def begin(self) -> None:
        super().begin()
        self.work(self.build.run())

    def befall(self) -> None:
        if self.rng.random() < 0.3:
            self.build.kill()
        else:
            super().befall()

    async def end(self) -> bool:
        """Return whether the old server has led on to the new one; note what that has, and where the old one ends."""
        build = self.build
        if not hasattr(build, "manifest"):
            return False
        (predecessor,) = build.manifest.predecessors
        old = None
        (end_seq,) = predecessor.seqs
        for server in self.servers:
            if isinstance(server.shard, Shard):
                try:
                    if not await self.leads_on(server.shard):
                        return False
                except ReshardedError:
                    old = server.shard
        if old is None:
            return False
        records = [record for record in old.log.read(old.log.first_seq) if record.header["kind"] == KIND_BATCH]
        if records and records[-1].seq > end_seq:
            raise Finding(
                f"a batch was taken at seq {records[-1].seq}, behind the place {end_seq} at which a build ends"
            )
        for trainer in self.trainers:
            numbers = [each.header["client_seq"] for each in records if each.header["client"] == trainer.name]
            self.ledger.cut(trainer.account, max(numbers, default=0))
        values = {}
        for number, server in enumerate(build.servers):
            homes = shards_of_rows(SPEC.seed, np.asarray(self.ledger.rows, "<i8"), len(build.servers))
            rows = [row for row, home in zip(self.ledger.rows, homes, strict=True) if home == number]
            values |= dict(zip(rows, await read_rows(server, rows), strict=True)) if rows else {}
        self.final = values, {each.seq: (each.header["client"], each.header["client_seq"]) for each in records}
        return True


class _Build:
    """Builds a server of two shards, again and again until that is published, and serves it.

    Attributes:
        servers: Its shards.
        manifest: Once it is published.
    """

    manifest: Manifest

    def __init__(self, schedule: BuildSchedule) -> None:
        self._schedule, self._rng = schedule, schedule.draw_rng()
        self._host: Host | None = None
        self._target = World.folder / "new"
        self.servers = [
            SimulatedServer(schedule.loop, "new", port, follow=None, has_claims=False) for port in (7101, 7102)
        ]

    def kill(self) -> None:
        """Kill the process that builds."""
        if self._host is not None:
            self._schedule.did["killed builds"] += 1
            self._host.kill()

    async def run(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.5, 6.0))
        while not (self._target / MANIFEST_NAME).exists():
            self._host = Host(self._schedule.loop, "new")
            with contextlib.suppress(HeadraceError, asyncio.CancelledError, OSError):
                await asyncio.wait([task := self._host.run(self._try_once())])
                task.result()
            self._schedule.did["builds"] += 1
            await asyncio.sleep(self._rng.choice((0.1, 1.0)))
        self._host = None
        manifest = find_manifest(self._target)
        assert manifest is not None
        self.manifest = manifest
        for shard, server in enumerate(self.servers):
            server.use(
                self._target / shard_folder(shard),
                shard=shard,
                server_id=self.manifest.server_id,
                addresses=tuple(("127.0.0.1", each.port) for each in self.servers),
                predecessors=self.manifest.predecessors,
            )
            self._schedule.start(server)

    async def _try_once(self) -> None:
        schedule = self._schedule
        server = self._rng.choice([each for each in schedule.servers if isinstance(each.shard, Shard)] or [None])
        if server is not None:
            seeds = [("127.0.0.1", server.port)]
            address = f"127.0.0.1:{self.servers[0].port}"
            await build_server(seeds, ADMIN_DIAL, self._target, num_shards=len(self.servers), address=address)


class _MemoryNewDir(NewDataDir):
    """The directory of a new server, whose logs are in memory."""

    def __init__(self, target: Path, *, shards: Iterable[int], work: str) -> None:
        super().__init__(target, shards=shards, work=work)
        self._host = host_here()
        self._host.on_kill.append(self._unlock)

    def publish(
        self,
        run: str,
        specs: Iterable[TableSpec],
        *,
        seq: int = FIRST_SEQ,
        predecessors: Sequence[Predecessor] = (),
    ) -> None:
        """As `NewDataDir.publish`."""
        tables = [pack_spec(spec) for spec in specs]
        header = {"kind": KIND_HELLO, "run": run, "client": self.work, "rank": 0, "world_size": 0, "tables": tables}
        for shard in self._shards:
            DiskLog.at(self.shard_path(shard) / "log", begin_seq=seq).add(header)
        num_shards = len(self._shards)
        self.publish_copy(Manifest(server_id="new", num_shards=num_shards, predecessors=tuple(predecessors)))

    def close(self) -> None:
        """As `NewDataDir.close`, unless it died before."""
        if self._lock is not None and not self._host.is_dead:
            super().close()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class _MemoryStoreBuilder:
    """What a builder takes for its `StoreBuilder`: rows go to stores in memory."""

    def __init__(self, target: Path, *, num_shards: int, specs: Sequence[TableSpec], run: str, work: str) -> None:
        self.catalog = Catalog({})
        self._meta = self.catalog.add(specs)
        self.directory = _MemoryNewDir(target, shards=range(num_shards), work=work)
        self._runs: list[list[SortedRun]] = [[] for _ in range(num_shards)]

    def take_history(self, catalog: Catalog) -> None:
        """As `StoreBuilder.take_history`."""
        self._meta |= self.catalog.take_history(catalog)

    def add_records(self, fqn: str, row_ids: Any, records: Any, shard: ColumnShard | None = None) -> None:
        """As `StoreBuilder.add_records`."""
        table = self.catalog.find(fqn)
        layout = table.layout_of(shard or table.spec.whole)
        homes = shards_of_rows(table.spec.seed, row_ids, len(self._runs))
        for number, runs in enumerate(self._runs):
            at = np.flatnonzero(homes == number)
            runs.append(SortedRun(table.table_id, layout, row_ids[at], records[at]))

    def finish_stores(self, meta: dict[bytes, bytes]) -> None:
        """As `StoreBuilder.finish_stores`."""
        for number, runs in enumerate(self._runs):
            store = row_store.RowStore.open(self.directory.shard_path(number) / "store")
            store.write_runs(runs, meta=self._meta | meta, applied_seq=FIRST_SEQ)
            store.close()

    def __enter__(self) -> _MemoryStoreBuilder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.directory.close()


if __name__ == "__main__":
    sys.exit(main(BuildSchedule, __doc__))
