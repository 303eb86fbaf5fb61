"""What becomes visible when: whole steps of all shards, new tables, freshness; without a server."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scripted_logs import SPEC, Copy, Following, Shard, begun
from text_scripts import Script, scripts

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog
from headrace.schemas.errors import ConfigError, CorruptionError, InvariantError, OverloadedError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, TableSpec


@scripts(__file__, "steps")
def test_which_steps_are_shown(script: Script) -> None:
    """Whole steps of all shards and ranks, the newest or a recorded one, whatever comes between."""
    script.run(Following())


@scripts(__file__, "freshness")
def test_freshness(script: Script) -> None:
    """Lag, delay and age are those of the updates, on the trainer's clock."""
    script.run(Following())


def test_a_shard_waits_only_for_those_behind_it() -> None:
    """The shard behind is fetched from, however much it has in memory."""
    tails = [
        ShardTail(shard, seq=0, catalog=Catalog({}), sessions=Sessions({}), exact_from=at)
        for shard, at in ((0, 2), (1, 3))
    ]
    table_set = TableSet("s", tails, is_by_step=True, make_table=MemoryTable)
    shards = [Shard(), Shard()]
    for step in (1, 2):
        for shard in shards:
            shard.write(step, float(step))
    ours, theirs = shards[0].take(), shards[1].take()
    table_set.take(0, ours[:2], 3)  # hello and step 1, which the other's copy is beyond
    table_set.take(1, theirs, 3)
    assert table_set.visible is None
    assert not table_set.is_waiting(0, max_bytes=10) and table_set.is_waiting(1, max_bytes=10)
    assert not table_set.is_waiting(1, max_bytes=10_000)
    assert table_set.take(0, ours[2:], 3) and table_set.visible == (1, 2)
    assert not table_set.is_waiting(0, max_bytes=10) and not table_set.is_waiting(1, max_bytes=10)


MAX_BYTES = 20_000


def take_all(copy: Copy, shard: int, updates: list[Update]) -> int:
    """Take records one by one with `make_room` after each; return the most pending bytes."""
    most = 0
    for update in updates:
        copy.take(shard, [update])
        copy.table_set.make_room(shard, MAX_BYTES)
        most = max(most, copy.table_set.tails[shard].pending_bytes)
    return most


def test_a_copy_that_is_shown_does_not_grow_with_a_step() -> None:
    """A shown copy within an endless step ends with an error, and lookups see the last step."""
    copy, (shard,) = begun()
    copy.table_set.is_shown = True
    shard.write(2, 2.0, ends=False)  # and there the trainer dies
    for row in range(100):
        shard.backfill(row, 9.0)
    with pytest.raises(OverloadedError, match=r"shard 0: updates .* more than max_pending_bytes, .* dense_interval_s"):
        take_all(copy, 0, shard.take())
    assert MAX_BYTES < copy.table_set.tails[0].pending_bytes < MAX_BYTES + 5000
    assert (copy.table_set.visible, copy.values(0)) == ((1, 1), [1.0])
    copy.table_set.limits = [3]  # while it is held it may wait, and is not fetched from
    copy.table_set.make_room(0, MAX_BYTES)
    assert copy.table_set.is_waiting(0, MAX_BYTES)


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_shard_that_is_ahead_keeps_the_steps_that_others_come_to(is_shown: bool) -> None:
    """What a shard ahead has pending is neither too much nor applied early."""
    copy, shards = Copy(2), [Shard(), Shard()]
    copy.table_set.is_shown = is_shown
    for step in range(1, 21):
        for shard in shards:
            shard.write(step, float(step))
    shards[0].write(21, 21.0, ends=False)
    assert take_all(copy, 0, shards[0].take()) > MAX_BYTES
    assert copy.table_set.is_waiting(0, MAX_BYTES)
    take_all(copy, 1, shards[1].take())
    assert (copy.table_set.visible, copy.values(0)) == ((1, 20), [20.0])


@settings(max_examples=50)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    shown_at=st.integers(0, 12),
)
def test_whatever_room_was_made_a_copy_comes_to_the_newest_step(
    lengths: list[tuple[int, int]], order: Any, shown_at: int
) -> None:
    """Memory is bounded, no step is torn, and the last one is shown, for any step lengths and order."""
    copy, shards = Copy(2), [Shard(), Shard()]
    copy.table_set.add_tables([SPEC])
    for step, of_shards in enumerate(lengths, 1):
        for shard, length in zip(shards, of_shards, strict=True):
            for i in range(length):
                shard.write(step, step + i / 100 if i < length - 1 else float(step), ends=i == length - 1)
    queues = [shard.take() for shard in shards]
    is_lost = False
    while any(queues) and not is_lost:
        visible = copy.table_set.visible
        copy.table_set.is_shown = copy.table_set.is_shown or (visible is not None and visible[1] >= shown_at)
        able = [at for at in range(2) if queues[at] and not copy.table_set.is_waiting(at, MAX_BYTES)]
        assert able, "all shards wait"
        at = order.choice(able)
        try:
            assert take_all(copy, at, [queues[at].pop(0)]) < MAX_BYTES + 5000
        except OverloadedError:
            is_lost = True
        visible = copy.table_set.visible
        if visible is not None:
            assert copy.values(0) == [float(visible[1])] if visible[1] > 0 else [0.0]
        assert not (copy.table_set.is_shown and visible is None)
    assert is_lost or copy.table_set.visible == (1, len(lengths))


def test_a_copy_that_begins_at_a_step_shows_it() -> None:
    """A shard copied at a step stays at it, though its log ends within the next step."""
    shard, sessions = Shard(), Sessions({})
    shard.write(1, 1.0)
    learnt = ShardTail(0, seq=0, catalog=Catalog({}), sessions=sessions)
    for update in shard.take():
        learnt.take(update)
    tails = [
        ShardTail(0, seq=2, catalog=learnt.catalog, sessions=sessions),
        ShardTail(1, seq=0, catalog=Catalog({}), sessions=Sessions({})),
    ]
    table_set = TableSet("s", tails, is_by_step=True, make_table=MemoryTable)
    shard.write(2, 2.0, ends=False)
    table_set.take(0, shard.take(), 3)
    other = Shard()
    other.write(1, 1.0)
    assert table_set.take(1, other.take(), 2) and table_set.visible == (1, 1)
    assert tails[0].pending_bytes > 0


def test_a_failure_amid_a_step_is_known_before_the_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers learn of a partly applied step before they see it."""
    copy, (shard,) = begun()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room for a larger table")

    monkeypatch.setattr(copy.table_set.tables["t"], "apply", fail)
    shard.write(2, 2.0)
    with pytest.raises(MemoryError):
        copy.take(0, shard.take())
    assert "no room for a larger table" in str(copy.table_set.failure)


@pytest.mark.parametrize("fault", ["lost", "another", "delta"])
def test_rows_that_are_not_the_record_s_are_not_shown(fault: str) -> None:
    """Rows that were lost or changed while they waited for their step are an error, and the copy is known to be bad."""
    copy, (shard,) = begun()
    shard.write(2, 2.0, ends=False)
    copy.take(0, shard.take())
    (change,) = copy.table_set.tails[0].pending
    (delta,) = change.deltas
    rows = {"lost": delta.row_ids[:0], "another": delta.row_ids + 1}.get(fault)
    deltas = () if rows is None else (dataclasses.replace(delta, row_ids=rows),)
    copy.table_set.tails[0].pending[0] = dataclasses.replace(change, deltas=deltas)
    shard.end(2)
    with pytest.raises(InvariantError, match=f"^log record {change.seq} → replica: 1 rows"):
        copy.take(0, shard.take())
    assert isinstance(copy.table_set.failure, InvariantError)
    assert copy.table_set.visible == (1, 1)


def test_a_gap_ends_it() -> None:
    """A record out of order, or one that cannot be decoded, is refused."""
    copy, shard = Copy(1), Shard()
    shard.write(1, 1.0)
    updates = shard.take()
    with pytest.raises(CorruptionError, match="record 2 follows 0"):
        copy.take(0, updates[1:])
    with pytest.raises(CorruptionError, match="record 1 cannot be applied"):
        copy.take(0, [Update(1, 1, idl.UpdateKind.BATCH, {}, memoryview(b"nonsense"))])


@pytest.mark.parametrize("is_by_step", [False, True])
def test_a_table_grows_with_the_hello_that_says_so(is_by_step: bool) -> None:
    """The same table object has more rows, once; records from before the growth still count, and nothing shrinks."""
    small = TableSpec(fqn="t", num_rows=3, dim=1, dtype=DType.FLOAT32, has_identities=True)
    larger = dataclasses.replace(small, num_rows=5)
    copy = Copy(2, is_by_step=is_by_step)
    copy.table_set.add_tables([small])
    table, identities = copy.table_set.tables["t"], copy.table_set.identities["t"]
    copy.table_set.add_tables([larger, small, larger])
    assert copy.table_set.tables["t"] is table and copy.table_set.identities["t"] is identities
    assert table.spec == larger and table.gather(np.array([4]))[1].all()
    assert identities.find(np.array([4])).tolist() == [-1]


def test_a_table_is_shown_once_all_shards_have_all_of_it() -> None:
    """By step lookups see no row of it before, also not amid a pause; what they have found stays."""
    copy, shards = begun(2, is_by_step=True)
    table_set = copy.table_set
    for epoch in (2, 3):
        for number, shard in enumerate(shards):
            shard.spec = dataclasses.replace(SPEC, fqn="u", dim=2)
            shard.hello(0, epoch=epoch)
            shard.updates[-1].header["fills"] = {"u": -1}
            copy.take(number, shard.take())
        assert (table_set.hidden, table_set.any_table("u").spec.dim) == (["u"] if epoch == 2 else [], 2)
        for number, shard in enumerate(shards):
            if epoch == 2:
                with pytest.raises(UnknownTableError, match="'u' is incomplete"):
                    table_set.table("u")
            shard._write(1, 2.0, row=number, client_seq=1, client="rank0", epoch=epoch, ends=True)
            table_set.limits = [tail.visible_seq for tail in table_set.tails]
            copy.take(number, shard.take())
            assert (table_set.hidden == ["u"]) is (epoch == 2), "paused"
            table_set.limits = None
            table_set.advance()
        assert table_set.hidden == []
        assert table_set.table("u").gather(np.arange(2))[0].tolist() == [[2.0, 2.0]] * 2
    with pytest.raises(ConfigError, match="table 'u' is 2 × float32 now and 9 × float32 in the served model"):
        table_set.table(dataclasses.replace(SPEC, fqn="u", dim=9))
    table_set.close()
