"""What a shard takes over of another one besides rows: tables, floors, drops, fences, sessions."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from table_commands import TableCommands
from text_scripts import Script, scripts

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Catalog, Filling, Owner
from headrace.paramserver.store.shared_state import check_shared_state, pack_shared_state, take_shared_state
from headrace.schemas.errors import FencedError, RequestError
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="a", num_rows=10, dim=4, dtype=DType.FLOAT32)
OTHER = TableSpec(fqn="b", num_rows=10, dim=2, dtype=DType.FLOAT32, has_identities=True)
LATER = replace(OTHER, fqn="c")


class _Shard:
    def __init__(self, *specs: TableSpec) -> None:
        self.meta: dict[bytes, bytes] = {}
        self.catalog, self.sessions = Catalog({}), Sessions({})
        self.catalog.add(specs)

    def take(self, other: _Shard, *, with_steps: bool = False) -> dict[bytes, bytes]:
        data = pack_shared_state(other.catalog, other.sessions)
        before = self.catalog.packed()
        check_shared_state(data, self.catalog)
        assert self.catalog.packed() == before
        meta = take_shared_state(data, self.catalog, self.sessions, 7, with_steps=with_steps)
        again = take_shared_state(data, self.catalog, self.sessions, 8, with_steps=with_steps)
        assert self.catalog.packed() == Catalog(self.catalog.packed()).packed()
        assert not any(key.startswith((b"table/", b"session/", b"floor/", b"dropped/", b"owner/")) for key in again)
        return meta


def _restarted(shard: _Shard, meta: dict[bytes, bytes]) -> Catalog:
    """Return the catalog of a store that had a shard's, and in which `meta` was saved."""
    return Catalog({key: value for key, value in (shard.catalog.packed() | meta).items() if value})


def test_a_new_shard_gets_all_of_the_tables() -> None:
    """Specs, growth, what is lacking, owners, floors, scalars and drops are those of the source."""
    source, new = _Shard(SPEC, OTHER, LATER, replace(SPEC, fqn="gone")), _Shard(OTHER)
    source.catalog.grow(replace(SPEC, num_rows=20))
    source.catalog.claim(["a"], Owner("run", 5))
    source.catalog.raise_floors({"b": (3, 4)})
    source.catalog.set_scalars("a", [("step", DType.INT64, bytes(8))], 5, 6)
    source.catalog.begin_filling({"c": Filling(5, 9), "b": Filling(5, 9, 3, updated_only=True)})
    source.catalog.drop(["gone"], 4)
    meta = new.take(source)
    for catalog in (new.catalog, _restarted(_Shard(OTHER), meta)):
        for table in source.catalog:
            mine = catalog.find(table.spec.fqn)
            for name in ("spec", "scalars", "owner", "floor", "earlier", "filling"):
                assert getattr(mine, name) == getattr(table, name), name
        assert catalog.drop_epochs == source.catalog.drop_epochs
    assert new.catalog.find("b").table_id == 1


@scripts(__file__, "shared_state")
def test_shared_state(script: Script) -> None:
    """What is newer at the destination stays, and a table that may be another one is refused."""
    script.run(TableCommands())


def _open(shard: _Shard, run: str, epoch: int, step: int, *, client: str = "rank0", world_size: int = 1) -> Any:
    session = shard.sessions.open(run, client, epoch, 0, world_size)
    shard.sessions.advance(session, client_seq=1, step=step, time_us=9, ends_step=True, is_exact_cut=True)
    shard.sessions.settle(session, 1)
    return session


@pytest.mark.parametrize("with_steps", [False, True])
def test_fences_come_and_batches_do_not(with_steps: bool) -> None:
    """Older epochs are refused as at the source; each client begins with batch 1; steps are kept only where told."""
    source, mine = _Shard(), _Shard()
    _open(source, "old", 3, 30)
    _open(source, "same", 5, 50)
    _open(source, "backfill", 2, 0, world_size=0)
    source.sessions.raise_version_epoch(40)
    _open(mine, "same", 5, 7)
    _open(mine, "newer", 9, 1)
    meta = mine.take(source, with_steps=with_steps)
    for sessions in (mine.sessions, Sessions(meta)):
        with pytest.raises(FencedError):
            sessions.fence("old", 2)
        assert sessions.highest_epoch == 40
        old = sessions.find("old", "rank0")
        assert old is not None
        assert (old.last_client_seq, old.step, old.world_size) == (0, 30 if with_steps else -1, 1)
        assert sessions.exact_step_of(3) == (30 if with_steps else None)
        assert sessions.accept("old", "rank0", 3, 1)[1]
        assert sessions.epoch_of("backfill") == 2
    kept = mine.sessions.find("same", "rank0")
    assert kept is not None and (kept.last_client_seq, kept.step) == (1, 7)


def test_forgotten_trainers_stay_forgotten() -> None:
    """A trainer whose session the source has forgotten may not begin anew at the destination either."""
    source, mine = _Shard(), _Shard()
    source.sessions = Sessions({b"forgotten_epoch": b"6"})
    meta = mine.take(source)
    for sessions in (mine.sessions, Sessions(meta)):
        with pytest.raises(FencedError, match="too old"):
            sessions.check_remembered("run", "rank0", 6, 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"x", zlib.compress(b"x")[:-1], zlib.compress(msgpack.packb({b"table/1": b"x"})), zlib.compress(b"\x01")],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    """What is no state of a shard is refused before it is in the log."""
    with pytest.raises(RequestError, match="cannot be read"):
        check_shared_state(data, Catalog({}))
