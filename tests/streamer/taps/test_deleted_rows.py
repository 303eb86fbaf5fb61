"""Evicted rows: which are deleted, when, and what step marks promise about them."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from trainer_tables import SMALL_BYTES, WIDE, Submitted, Trained, VirtualRows, deleted_of, rows_of, taken

from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.routing import shards_of_rows, table_seed


def evict(table: Trained | VirtualRows, rows: list[int]) -> None:
    table.tapped.evict(torch.tensor(rows, dtype=torch.int64))


@pytest.mark.parametrize("max_bytes", [500, 2**22])
def test_evicted_rows_are_deleted_unless_they_are_used_again(max_bytes: int) -> None:
    """Evicted rows that change before the flush go out with their values, the others as deletions to their shards."""
    table = Trained(row_offset=1000)
    submitted = Submitted([table], num_shards=3)
    table.update(range(40), 1.0)
    evict(table, list(range(30)))
    table.update([3, 4], 2.0)
    evict(table, [4])
    assert submitted.flusher.num_dirty_rows == 10 + 1 + 30
    submitted.flusher.on_step(1)
    (flush,) = submitted.flushes
    assert flush.mark is not None
    assert flush.mark.is_exact_cut
    deleted = deleted_of(flush, 3, max_bytes=max_bytes)
    gone = np.array([1000 + row for row in range(30) if row != 3])
    assert sorted(row for _, _, row in deleted) == gone.tolist()
    shards = shards_of_rows(table_seed("t.weight"), gone, 3)
    assert {row: shard for shard, _, row in deleted} == dict(zip(gone.tolist(), shards.tolist(), strict=True))
    assert sorted(row for _, _, row, _ in rows_of(flush, 3)) == [1003, *range(1030, 1040)]
    assert (flush.num_rows, flush.size_bytes) == (40, 11 * 24 + 29 * 8)
    assert submitted.flusher.num_dirty_rows == 0
    for shard in range(3):
        assert all(message.size_bytes <= max_bytes for message in flush.messages(shard, max_bytes))


def test_deletions_of_a_failed_flush_are_sent_again() -> None:
    """Deletions of a refused flush go out with the next one, except for rows used meanwhile."""
    table = Trained()
    submitted = Submitted([table])
    evict(table, [1, 2, 3])
    submitted.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        submitted.flusher.on_step(1)
    submitted.error = None
    table.update([2], 1.0)
    submitted.flusher.on_step(2)
    assert [row for _, _, row in deleted_of(submitted.flushes[0], 1)] == [1, 3]
    assert taken(submitted.flushes[0]) == [2]


def test_evicted_rows_are_not_sent_to_a_new_store() -> None:
    """Sending all rows again leaves out rows that were evicted and not used since."""
    table = Trained(num_rows=10)
    submitted = Submitted([table])
    evict(table, [1, 2, 3, 4])
    submitted.flusher.on_step(1)
    table.update([2], 1.0)
    submitted.flusher.on_step(2)
    submitted.release()
    table.update([3], 1.0)
    submitted.flusher.mark_all(num_losses=1)
    submitted.flusher.on_step(3)
    assert taken(submitted.flushes[-1]) == [0, 2, 3, 5, 6, 7, 8, 9]


def test_a_shard_that_lost_rows_gets_its_own_again_and_their_deletions() -> None:
    """Rows of other shards are not sent; evicted rows are deleted again, unless they are used again."""
    table = Trained(num_rows=200)
    submitted = Submitted([table], num_shards=3)
    shards = shards_of_rows(table.tapped.spec.seed, np.arange(200), 3)
    lost = np.flatnonzero(shards == 1).tolist()
    other = np.flatnonzero(shards != 1).tolist()
    evict(table, [*lost[:3], *other[:3]])
    submitted.flusher.on_step(1)
    table.update([lost[0], other[0]], 1.0)
    submitted.flusher.on_step(2)
    submitted.release()
    submitted.flusher.mark_partitions(PartitionMap.first(3).owners == 1, num_losses=1)
    submitted.flusher.on_step(3)
    flush = submitted.flushes[-1]
    assert sorted(row for _, _, row, _ in rows_of(flush, 3)) == [lost[0], *lost[3:]]
    assert [row for _, _, row in deleted_of(flush, 3)] == lost[1:3]
    assert flush.num_losses == 1


def test_a_pass_that_runs_when_rows_are_lost_begins_anew() -> None:
    """The step that a pass was about to complete is not marked: rows before its cursor have to go out again."""
    table = Trained(num_rows=40_000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    table.mark(range(40_000))
    submitted.flusher.on_step(1)
    submitted.release()
    submitted.flusher.mark_partitions(PartitionMap.first(1).owners == 0, num_losses=1)
    sent: set[int] = set()
    for step in range(2, 99):
        submitted.flusher.on_step(step)
        sent |= set(taken(submitted.flushes[-1]))
        submitted.release()
        if submitted.flushes[-1].mark is not None:
            break
    assert sent == set(range(40_000))


def test_more_deletions_than_a_buffer_holds_leave_room_for_rows() -> None:
    """Deletions take at most half a buffer while rows wait, and no step mark is sent before all are out."""
    table = Trained(num_rows=40_000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    evict(table, list(range(20_000)))
    table.mark(range(39_000, 40_000))
    deleted: list[int] = []
    sent: list[int] = []
    for step in range(1, 9):
        submitted.flusher.on_step(step)
        flush = submitted.flushes[-1]
        deleted += [row for _, _, row in deleted_of(flush, 1)]
        sent += taken(flush)
        submitted.release()
        if flush.mark is not None:
            break
    assert flush.mark is not None
    assert (flush.mark.step, flush.mark.is_exact_cut) == (step, True)
    assert deleted == list(range(20_000))
    assert sent == list(range(39_000, 40_000))
    assert submitted.flushes[0].num_rows > 4000 + 400


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1199), max_size=300),
            st.lists(st.integers(0, 1199), max_size=300),
            st.booleans(),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    ),
    is_virtual=st.booleans(),
)
def test_marks_keep_their_promise_with_evictions(
    steps: list[tuple[list[int], list[int], bool, bool, bool]], is_virtual: bool
) -> None:
    """At an exact step mark the store equals the tables; at any mark no row is older than its step."""
    table = VirtualRows("v.weight", 1200, 40) if is_virtual else Trained("v.weight", 1200, 40)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES, num_shards=2)
    now: dict[int, float] = {}
    stored: dict[int, float] = {}
    # The step at which each row was last changed or evicted, as of each step, and what the store has seen of it.
    changed_at: dict[int, int] = {}
    history: dict[int, dict[int, int]] = {0: {}}
    seen_at: dict[int, int] = {}
    for step, (updated, evicted, evicts_first, releases, fails) in enumerate(steps, 1):
        for is_eviction in (evicts_first, not evicts_first):
            if not is_eviction:
                table.update(updated, float(step))
                now.update(dict.fromkeys(updated, float(step)))
                continue
            evict(table, evicted)
            if isinstance(table, VirtualRows):
                table.drop({row for row in evicted if row in table.place_of})
            for row in evicted:
                now.pop(row, None)
        changed_at |= dict.fromkeys([*updated, *evicted], step)
        history[step] = dict(changed_at)
        num_before = len(submitted.flushes)
        submitted.error = RuntimeError("no") if fails else None
        with pytest.raises(RuntimeError) if fails and submitted.pool.num_free else contextlib.nullcontext():
            submitted.flusher.on_step(step)
        for flush in submitted.flushes[num_before:]:
            sent = {row: float(np.frombuffer(data, "<f4")[0]) for _, _, row, data in rows_of(flush, 2)}
            deleted = {row for _, _, row in deleted_of(flush, 2)}
            assert not deleted & sent.keys()
            stored |= sent
            for row in deleted:
                stored.pop(row, None)
            seen_at |= dict.fromkeys([*sent, *deleted], step)
            if flush.mark is not None:
                then = history[flush.mark.step]
                assert all(seen_at.get(row, 0) >= at for row, at in then.items())
                assert not flush.mark.is_exact_cut or stored == now
        if releases:
            submitted.release()
    submitted.error = None
    for _ in range(8):
        submitted.release()
        submitted.flusher.on_step(len(steps) + 1)
    submitted.release()
    assert submitted.flusher.num_dirty_rows == 0


def test_a_pass_ends_when_its_deletions_are_out() -> None:
    """With rows always dirty, no mark precedes the deletions that were pending when the flush pass began."""
    table = Trained(num_rows=40_000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    evict(table, list(range(20_000, 40_000)))
    deleted: set[int] = set()
    marks = []
    for step in range(1, 12):
        table.mark(range(600))
        submitted.flusher.on_step(step)
        flush = submitted.flushes[-1]
        deleted |= {row for _, _, row in deleted_of(flush, 1)}
        assert flush.mark is None or len(deleted) == 20_000
        marks += [flush.mark] if flush.mark else []
        submitted.release()
    assert marks
