"""The commands of scripts about a shard's tables and sessions, and about what one shard takes over of another."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace.paramserver.ingest.ownership import check_owners, claimable
from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.store.catalog import Catalog, Filling, Owner, Table
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.schemas.version import MAX_EPOCH

__all__ = ["ITEMS", "TableCommands", "spec_of"]

ITEMS = TableSpec(
    fqn="items.weight",
    num_rows=100,
    dim=8,
    dtype=DType.FLOAT16,
    states=(
        StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),
        StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32),
    ),
    has_identities=True,
)


def spec_of(word: str) -> TableSpec:
    """Return the spec like `ITEMS` of a name and of changes: `users`, or `users:dim=3,num_rows=7`."""
    name, _, changes = word.partition(":")
    pairs = (change.split("=") for change in changes.split(",") if change)
    return dataclasses.replace(ITEMS, fqn=name, **{field: int(value) for field, value in pairs})


class _Shard:
    def __init__(self) -> None:
        self.meta: dict[bytes, bytes] = {}
        self.catalog, self.sessions, self.seq = Catalog({}), Sessions({}), 0

    def end(self, session: Session) -> dict[bytes, bytes]:
        session.has_ended = True
        ended = self.catalog.end_run(session.run) if self.sessions.has_ended(session.run) else {}
        return ended | self.sessions.settle(session, self.seq)


class TableCommands:
    """Shards by name; commands are for the one that `shard` named last. Whatever changes must be saved with it."""

    def __init__(self) -> None:
        self._shards: dict[str, _Shard] = {}
        self.shard("a")

    def shard(self, name: str) -> None:
        self._at = self._shards.setdefault(name, _Shard())

    def _save(self, meta: dict[bytes, bytes]) -> None:
        at = self._at
        at.meta = {key: value for key, value in (at.meta | meta).items() if value}
        again = Catalog(at.meta)
        assert [*map(_told, again)] == [*map(_told, at.catalog)]
        assert [table.owner for table in again] == [table.owner for table in at.catalog]
        assert again.drop_epochs == at.catalog.drop_epochs
        assert [each.pack() for each in Sessions(at.meta)] == [each.pack() for each in at.sessions]
        gone = {b"%d" % number for number in at.catalog.dropped}
        left = {key for key, value in at.meta.items() if not key.startswith((b"dropped/", b"session/"))}
        assert not {key for key in left if {key.rpartition(b"/")[2], at.meta[key]} & gone}, "something is left"

    def restart(self) -> None:
        self._at.catalog, self._at.sessions = Catalog(self._at.meta), Sessions(self._at.meta)

    def check(self, *words: str, epoch: int = MAX_EPOCH) -> str:
        """Tell which specs a hello of an epoch would register or change."""
        return (
            " ".join(spec.fqn for spec in self._at.catalog.check([*map(spec_of, words)], epoch=epoch)) or "nothing new"
        )

    def add(self, *words: str) -> None:
        self._save(self._at.catalog.add([*map(spec_of, words)]))

    def grow(self, word: str) -> None:
        """Give a table more rows; its record layouts stay the same objects, which pending rows refer to."""
        table = self._at.catalog.find(spec_of(word).fqn)
        layout = table.layout_of(ITEMS.whole)
        self._save(self._at.catalog.grow(spec_of(word)))
        assert table.layout_of(ITEMS.whole) is layout

    def drop(self, name: str, epoch: int) -> None:
        self._save(self._at.catalog.drop([name], epoch))

    def claim(self, name: str, run: str, epoch: int) -> None:
        self._save(self._at.catalog.claim([name], Owner(run, epoch)))

    def delete(self, name: str) -> None:
        """Note that rows of a table were deleted."""
        self._save(self._at.catalog.note_deletes(name))

    def scalar(self, table: str, name: str, value: int, epoch: int, step: int) -> None:
        data = value.to_bytes(4, "little")
        self._save(self._at.catalog.set_scalars(table, [(name, DType.FLOAT32, data)], epoch, step))

    def fill(self, name: str, epoch: int, step: int, **more: Any) -> None:
        self._save(self._at.catalog.begin_filling({name: Filling(epoch, step, **more)}))

    def hello(self, run: str, epoch: int, *words: str, takes_over: bool = False, rank: int = 0, ranks: int = 1) -> str:
        """Say hello as a rank of a trainer's, as shard 0 takes it; tell which tables change their owner."""
        return self._hello(run, epoch, words, rank, ranks, takes_over=takes_over)

    def backfill(self, run: str, epoch: int, *words: str) -> str:
        """Say hello as a backfill of tables, likewise."""
        return self._hello(run, epoch, words, 0, 0, is_backfill=True)

    def _hello(self, run: str, epoch: int, words: tuple[str, ...], rank: int, ranks: int, **how: bool) -> str:
        at, specs = self._at, [*map(spec_of, words)]
        names = claimable(at.catalog, at.sessions, specs, run, epoch, now_us=90_000_000, **how)
        owner = Owner(run, epoch, is_backfill=not ranks)
        meta = at.catalog.add(specs)
        for name in names:
            meta |= at.catalog.claim([name], owner.after(at.catalog.owner_of(name)))
        at.seq += 1
        self._save(meta | at.sessions.settle(at.sessions.open(run, f"rank{rank}", epoch, rank, ranks), at.seq))
        return "owns " + (" ".join(names) or "nothing new")

    def connect(self, run: str, num: int = 1) -> None:
        """Open or close connections of a run's first client."""
        session = self._at.sessions.find(run, "rank0")
        assert session is not None
        session.num_connections = num

    def end(self, run: str, rank: int = 0) -> None:
        """Have a rank say that it writes no more."""
        at = self._at
        session = at.sessions.find(run, f"rank{rank}")
        assert session is not None
        at.seq += 1
        self._save(at.end(session))

    def write(self, run: str, *names: str) -> None:
        """Write rows of tables, as far as their owners let it."""
        session = self._at.sessions.find(run, "rank0") or Session(run, "rank0", 1, 0, 1)
        check_owners(self._at.catalog, names, session)

    def show(self) -> list[str]:
        """Tell the tables, and which were dropped."""
        drops = [f"dropped {name} in epoch {epoch}" for name, epoch in sorted(self._at.catalog.drop_epochs.items())]
        return [*map(_told, self._at.catalog), *drops]


def _told(table: Table) -> str:
    scalars = [f"{s.name}={int.from_bytes(s.data, 'little')} of {s.epoch} {s.step}" for s in table.scalars.values()]
    parts = [
        f"{table.table_id} {table.spec.fqn}: {table.spec.num_rows} rows",
        "" if table.owner is None else f"owner {table.owner.run} in {table.owner.epoch}",
        "which has ended" if table.owner is not None and table.owner.has_ended else "",
        "rows deleted" if table.has_deletes else "",
        f"{len(table.earlier)} earlier" if table.earlier else "",
        ", ".join(scalars),
        f"lacks rows from {table.filling.from_row}" if table.filling else "",
    ]
    return ", ".join(filter(None, parts))
