"""When the flusher flushes, what it takes, and what its marks promise."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from trainer_tables import ROWWISE, Submitted, Trained, VirtualRows, deleted_of, rows_of

from headrace.kernels.dirty_ids import DirtyIds
from headrace.kernels.dirty_rows import DirtyRows
from headrace.schemas.errors import ConfigError, NonFiniteError, UnavailableError
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.streamer.flush import Flush
from headrace.streamer.staging import StagingBuffer, StagingPool
from headrace.streamer.tapped_table import TappedTable

# 64 KiB of staging hold about 2 × 450 rows of 72 bytes of these.
SMALL = 64 * 2**10
WIDE = 16


def taken(flush: Flush, fqn: str = "t.weight") -> list[int]:
    return sorted(row for _, name, row, _ in rows_of(flush, 1) if name == fqn)


def test_everything_dirty_in_one_flush_is_an_exact_cut() -> None:
    """A flush that leaves nothing dirty marks its own step as exact."""
    a, b = Trained("a.weight"), Trained("b.weight")
    submitted = Submitted([a, b])
    a.mark([3, 1])
    b.mark([2])
    submitted.flusher.on_step(5)
    (flush,) = submitted.flushes
    assert (taken(flush, "a.weight"), taken(flush, "b.weight")) == ([1, 3], [2])
    assert flush.mark is not None
    assert (flush.mark.step, flush.mark.is_exact_cut, flush.num_rows) == (5, True, 3)
    assert submitted.flusher.num_dirty_rows == 0


def test_step_without_changes_still_marks() -> None:
    """A rank without changed rows says that its step is complete, or it would hold up the others' watermark."""
    submitted = Submitted([Trained()])
    submitted.flusher.on_step(8)
    (flush,) = submitted.flushes
    assert flush.num_rows == 0
    assert flush.mark is not None
    assert flush.mark.step == 8


def test_without_a_free_buffer_rows_stay_dirty_and_coalesce() -> None:
    """Under `coalesce` nothing is taken while both buffers are out, and then the newest value goes once."""
    table = Trained()
    submitted = Submitted([table])
    for step in range(1, 6):
        table.update([0, step], float(step))
        submitted.flusher.on_step(step)
    assert [taken(flush) for flush in submitted.flushes] == [[0, 1], [0, 2]]
    assert submitted.flusher.num_dirty_rows == 4
    submitted.release()
    submitted.flusher.on_step(6)
    assert taken(submitted.flushes[2]) == [0, 3, 4, 5]
    values = {row: np.frombuffer(data, "<f4")[0] for _, _, row, data in rows_of(submitted.flushes[2], 1)}
    assert values == {0: 5.0, 3: 3.0, 4: 4.0, 5: 5.0}


def test_more_than_a_buffer_goes_out_in_parts() -> None:
    """The parts of a large dirty set carry no mark until the last, which is exact when nothing changed meanwhile."""
    table = Trained(num_rows=2000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
    table.mark(range(2000))
    seen: list[int] = []
    for step in range(1, 10):
        submitted.flusher.on_step(step)
        submitted.release()
        flush = submitted.flushes[-1]
        seen += taken(flush)
        if flush.mark is not None:
            break
    assert len(submitted.flushes) == 3
    assert [flush.mark is None for flush in submitted.flushes] == [True, True, False]
    assert flush.mark is not None
    assert (flush.mark.step, flush.mark.is_exact_cut) == (3, True)
    assert sorted(seen) == list(range(2000))


def test_hot_low_rows_do_not_starve_high_ones() -> None:
    """Rows dirty when a sweep began all leave before it is marked, however often others change meanwhile."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
    table.mark(range(3000))
    sent: set[int] = set()
    marks = []
    for step in range(1, 20):
        table.mark(range(1500))  # more than a buffer, every step
        submitted.flusher.on_step(step)
        submitted.release()
        flush = submitted.flushes[-1]
        sent.update(taken(flush))
        if flush.mark is not None:
            marks.append((flush.mark.step, flush.mark.is_exact_cut, step))
            if len(marks) == 1:
                assert sent == set(range(3000))
    assert marks[0] == (1, False, 4)
    assert len(marks) > 3
    assert all(not is_exact and marked < step for marked, is_exact, step in marks)


def test_row_that_changes_during_a_sweep_goes_once_a_flush() -> None:
    """A row that waits in the backlog and changes again is sent once, with its newest value."""
    table = Trained(num_rows=1200, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
    table.update(range(1200), 1.0)
    submitted.flusher.on_step(1)
    submitted.release()
    table.update([3, 1150], 2.0)
    submitted.flusher.on_step(2)
    rows = taken(submitted.flushes[1])
    assert len(rows) == len(set(rows))
    assert {3, 1150} < set(rows)
    values = {row: np.frombuffer(data, "<f4")[0] for _, _, row, data in rows_of(submitted.flushes[1], 1)}
    assert (values[3], values[1150], values[1149]) == (2.0, 2.0, 1.0)


def test_mark_of_an_earlier_step_is_a_message_of_its_own() -> None:
    """The end of a sweep is marked by an empty message with the step at which it began."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
    table.mark(range(3000))
    for step in range(1, 5):
        table.mark(range(1500))
        submitted.flusher.on_step(step)
        submitted.release()
    messages = list(submitted.flushes[-1].messages(0, 2**20))
    assert [(m.step, m.ends_step, bool(m.deltas)) for m in messages] == [(4, False, True), (1, True, False)]
    assert not messages[-1].is_exact_cut


def test_block_waits_for_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `block` a step goes on when a buffer becomes free, and sends what is dirty."""
    table = Trained()
    submitted = Submitted([table], policy="block")
    for step in (1, 2):
        table.mark([step])
        submitted.flusher.on_step(step)
    table.mark([3])
    releaser = threading.Thread(target=submitted.release)
    acquire = submitted.pool.acquire
    waits = []

    def acquire_and_release(timeout_s: float = 0.0) -> StagingBuffer | None:
        if timeout_s:
            waits.append(timeout_s)
            releaser.start()
        return acquire(timeout_s)

    monkeypatch.setattr(submitted.pool, "acquire", acquire_and_release)
    submitted.flusher.on_step(3)
    releaser.join()
    assert waits == [600.0]
    assert taken(submitted.flushes[2]) == [3]


def test_block_fails_at_its_deadline_and_names_the_shard() -> None:
    """Under `block` a step that waits too long fails, says who is behind, and keeps its rows dirty."""
    table = Trained()
    submitted = Submitted([table], policy="block", block_timeout_s=0.01)
    submitted.flusher.on_step(1)
    submitted.flusher.on_step(2)
    table.mark([4])
    with pytest.raises(UnavailableError, match=r"step 3 has waited 0\.01 s .* shard 0 is behind"):
        submitted.flusher.on_step(3)
    assert submitted.flusher.num_dirty_rows == 1


def test_flush_interval_holds_flushes_back() -> None:
    """With an interval, steps within it only mark."""
    now = [100.0]
    table = Trained()
    submitted = Submitted([table], flush_interval_s=10, clock=lambda: now[0])
    for step, now_s in enumerate([100.0, 101.0, 109.0, 110.0, 111.0], 1):
        now[0] = now_s
        table.mark([step])
        submitted.flusher.on_step(step)
    assert [taken(flush) for flush in submitted.flushes] == [[1], [2, 3, 4]]
    assert submitted.flushes[1].dirty_since_s == 101.0


def test_costly_flushes_are_rare() -> None:
    """After flushes of 10 ms the next one is due a second later at one percent, whatever one interrupted flush took."""
    now = [100.0]
    table = Trained()
    submitted = Submitted([table], flush_percent=1, clock=lambda: now[0])
    flushed_at = []
    for step in range(1, 60):
        now[0] += 0.1001
        table.mark([step % 50])
        submitted.cost = lambda: now.__setitem__(0, now[0] + (5.0 if flushed_at[-1:] == [21] else 0.01))
        submitted.flusher.on_step(step)
        if submitted.flushes and submitted.flushes[-1].step == step:
            flushed_at.append(step)
            submitted.release()
    # The fourth has taken 5 s, so the second after its beginning is over at the next step.
    assert flushed_at == [1, 11, 21, 31, 32, 42, 52]


def test_a_sweep_is_not_held_back() -> None:
    """While more is dirty than a buffer holds, every step at which a buffer is free flushes."""
    now = [100.0]
    table = Trained(num_rows=1000, dim=64)
    submitted = Submitted([table], flush_percent=1, staging_bytes=2**16, clock=lambda: now[0])
    submitted.cost = lambda: now.__setitem__(0, now[0] + 0.01)
    table.mark(range(1000))
    sent: list[int] = []
    for step in range(1, 6):
        submitted.flusher.on_step(step)
        sent += taken(submitted.flushes[-1])
        submitted.release()
    assert len(submitted.flushes) == 5
    assert sent == list(range(1000))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["weights", "momentum1"])
def test_reject_names_the_row_and_sends_nothing(bad: float, where: str) -> None:
    """Under `reject` NaN and Inf stop the whole flush, and its rows stay dirty."""
    good, table = Trained("good.weight"), Trained(row_offset=10, states=[ROWWISE])
    submitted = Submitted([good, table], non_finite="reject")
    good.mark([1])
    table.mark([2, 7, 9])
    with torch.no_grad():
        (table.weights if where == "weights" else table.states[where])[7, 0] = bad
    with pytest.raises(NonFiniteError, match=r"'t\.weight'.*" + where + r".* row 17 "):
        submitted.flusher.on_step(1)
    assert not submitted.flushes
    assert submitted.flusher.num_dirty_rows == 4
    assert submitted.pool.num_free == 2
    with torch.no_grad():
        (table.weights if where == "weights" else table.states[where])[7, 0] = 0
    submitted.flusher.on_step(2)
    assert submitted.flushes[0].num_rows == 4


def test_accept_sends_nan_as_it_is() -> None:
    """Under `accept` the bits of a NaN travel unchanged."""
    table = Trained(dim=1)
    submitted = Submitted([table])
    table.update([3], float("nan"))
    submitted.flusher.on_step(1)
    ((_, _, _, data),) = rows_of(submitted.flushes[0], 1)
    assert data == table.weights[3].detach().numpy().tobytes()


def test_failed_submit_forgets_nothing() -> None:
    """When the sender refuses a flush, its rows are dirty again and its buffer is free."""
    table = Trained(num_rows=2000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
    table.mark(range(2000))
    submitted.flusher.on_step(1)
    submitted.release()
    submitted.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        submitted.flusher.on_step(2)
    submitted.error = None
    assert submitted.pool.num_free == 2
    seen = taken(submitted.flushes[0])
    for step in (3, 4):
        submitted.flusher.on_step(step)
        submitted.release()
        seen += taken(submitted.flushes[-1])
    assert sorted(seen) == list(range(2000))


def test_flush_all_takes_everything_and_then_nothing() -> None:
    """`flush_all` ends with an exact cut at its step; a second one at the same step has nothing to do."""
    table = Trained()
    submitted = Submitted([table])
    table.mark(range(50))
    submitted.flusher.flush_all(4, 1.0)
    submitted.flusher.flush_all(4, 1.0)
    assert len(submitted.flushes) == 1
    submitted.flusher.flush_all(5, 1.0)
    assert submitted.flushes[1].mark is not None
    assert submitted.flushes[1].mark.step == 5


def test_flush_all_fails_when_no_buffer_becomes_free() -> None:
    """Without a free buffer `flush_all` says how many rows are left, and where it hangs."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
    table.mark(range(3000))
    with pytest.raises(UnavailableError, match=r"\d+ rows are not handed over.*shard 0 is behind"):
        submitted.flusher.flush_all(1, 0.01)
    assert len(submitted.flushes) == 2


def test_row_that_fits_nowhere_is_refused() -> None:
    """A table whose row exceeds a staging buffer or a frame is refused, with the setting to change."""
    table = Trained(num_rows=2, dim=20_000)
    submitted = Submitted([], staging_bytes=SMALL)
    with pytest.raises(ConfigError, match="staging_bytes"):
        submitted.flusher.check_tables([table.tapped], max_frame_bytes=2**26)
    submitted = Submitted([])
    with pytest.raises(ConfigError, match="max_frame_bytes"):
        submitted.flusher.check_tables([table.tapped], max_frame_bytes=2**16)


def test_closed_pool_wakes_who_waits() -> None:
    """A pool that is closed ends the wait for a buffer at once."""
    pool = StagingPool(2**16)
    assert pool.acquire() is not None
    assert pool.acquire() is not None
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert pool.acquire(60.0) is None
    closer.join()


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 1199), max_size=400), st.booleans(), st.booleans()), min_size=1, max_size=25
    )
)
def test_marks_keep_their_promise(steps: list[tuple[list[int], bool, bool]]) -> None:
    """At an exact mark the store equals the tables; at any mark no row is older than the marked step left it."""
    tables = [Trained("a.weight", 700, 40), Trained("b.weight", 500, 40)]
    for table in tables:
        table.weights.detach().zero_()  # older than any step
    submitted = Submitted(tables, staging_bytes=SMALL)
    stored = {table.tapped.spec.fqn: table.weights[:, 0].tolist() for table in tables}
    history: dict[int, dict[str, list[float]]] = {}
    for step, (rows, releases, is_wide) in enumerate(steps, 1):
        tables[0].update([row for row in rows if row < 700] + (list(range(700)) if is_wide else []), float(step))
        tables[1].update([row - 700 for row in rows if row >= 700], float(step))
        now = {table.tapped.spec.fqn: table.weights[:, 0].tolist() for table in tables}
        history[step] = now
        num_before = len(submitted.flushes)
        submitted.flusher.on_step(step)
        for flush in submitted.flushes[num_before:]:
            for _, fqn, row, data in rows_of(flush, 1):
                stored[fqn][row] = float(np.frombuffer(data, "<f4")[0])
            if flush.mark is not None and flush.mark.is_exact_cut:
                assert stored == now
            elif flush.mark is not None:
                then = history[flush.mark.step]
                assert all(s >= t for fqn in then for s, t in zip(stored[fqn], then[fqn], strict=True))
        if releases:
            submitted.release()
    submitted.release()
    for _ in range(5):
        submitted.flusher.on_step(len(steps) + 1)
        submitted.release()
    assert submitted.flusher.num_dirty_rows == 0


def test_row_ids_beyond_32_bits_stay_whole() -> None:
    """A shard that begins beyond row 2^33 of a table sends its rows by their 64-bit ids."""
    first = 2**33 + 5
    table = Trained(num_rows=40, row_offset=first, total_rows=2**34)
    submitted = Submitted([table], num_shards=3)
    table.update([0, 39], 1.0)
    submitted.flusher.flush_all(1, 1.0)
    (flush,) = submitted.flushes
    assert sorted(row for _, _, row, _ in rows_of(flush, 3)) == [first, first + 39]


def test_identities_travel_with_their_rows() -> None:
    """Rows of a table with identities carry the raw ids that they stand for when they are gathered, shard by shard."""
    identities = torch.arange(50, dtype=torch.int64) * 2**40
    plain = Trained(num_rows=50)
    spec = dataclasses.replace(plain.tapped.spec, has_identities=True)
    tapped = TappedTable(
        spec=spec,
        num_local_rows=50,
        weights=lambda: plain.weights,
        states=dict,
        identities=lambda: identities,
    )
    plain.tapped = tapped
    submitted = Submitted([plain], num_shards=2)
    plain.mark([3, 4, 49])
    identities[4] = -1
    submitted.flusher.flush_all(1, 1.0)
    found = {}
    for shard in range(2):
        for message in submitted.flushes[0].messages(shard, 2**20):
            for delta in message.deltas:
                rows, ids = (np.frombuffer(column, "<i8").tolist() for column in (delta.row_ids, delta.identities))
                found |= dict(zip(rows, ids, strict=True))
    assert found == {3: 3 * 2**40, 4: -1, 49: 49 * 2**40}


def test_virtual_ids_are_sent_from_their_places() -> None:
    """Rows of a table with virtual ids go out whole under their ids; those that are not held any more are deleted."""
    table = VirtualRows(states=[ROWWISE])
    submitted = Submitted([table], num_shards=3)
    ids = [2**41, 3, 2**62 + 1, 77]
    for value, row in enumerate(ids):
        table.update([row], float(value))
    table.drop([77, 3])
    table.update([5], 9.0)
    submitted.flusher.on_step(1)
    (flush,) = submitted.flushes
    assert flush.mark is not None
    assert flush.mark.is_exact_cut
    sent = {row: np.frombuffer(data, "<f4").tolist() for _, _, row, data in rows_of(flush, 3)}
    assert sent == {2**41: [0.0] * 5, 2**62 + 1: [2.0] * 4 + [-2.0], 5: [9.0] * 4 + [-9.0]}
    assert sorted(row for _, _, row in deleted_of(flush, 3)) == [3, 77]
    assert table.tapped.dirty.size_bytes < 2**20
    submitted.flusher.mark_all()
    assert submitted.flusher.num_dirty_rows == 3


def test_long_tables_keep_ids_while_those_are_smaller() -> None:
    """Beyond `bitmap_bytes` a table's changed rows are kept as ids, until a bitmap is smaller."""
    table = Trained(num_rows=2_000_000, dim=1)
    submitted = Submitted([table], bitmap_bytes=1000, staging_bytes=2**24)
    table.mark([1_999_999])
    submitted.flusher.on_step(1)
    assert isinstance(table.tapped.dirty, DirtyIds)
    assert taken(submitted.flushes[0]) == [1_999_999]
    submitted.release()
    table.mark(range(0, 2_000_000, 7))
    submitted.flusher.on_step(2)
    assert isinstance(table.tapped.dirty, DirtyRows)
    assert submitted.flushes[1].num_rows == len(range(0, 2_000_000, 7))
    submitted.release()
    submitted.flusher.on_step(3)
    assert isinstance(table.tapped.dirty, DirtyIds)
    submitted.flusher.mark_all()
    assert submitted.flusher.num_dirty_rows == 2_000_000


def test_a_sweep_takes_no_second_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """More dirty rows than a buffer holds go out of the one bitmap that a table has."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
    monkeypatch.setattr(DirtyRows, "__init__", lambda *_: pytest.fail("a second bitmap"))
    table.mark(range(3000))
    for step in range(1, 9):
        table.mark(range(1500))
        submitted.flusher.on_step(step)
        submitted.release()


def evict(table: Trained | VirtualRows, rows: list[int]) -> None:
    table.tapped.evict(torch.tensor(rows, dtype=torch.int64))


@pytest.mark.parametrize("max_bytes", [500, 2**22])
def test_evicted_rows_are_deleted_unless_they_are_used_again(max_bytes: int) -> None:
    """Of evicted rows, those that change before the flush go out with their values, the others as deletions, routed."""
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
    """When the sender refuses a flush its deletions are to be sent still, but for rows that are used meanwhile."""
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
    """When all rows are sent again, those that were evicted and not used since are not."""
    table = Trained(num_rows=10)
    submitted = Submitted([table])
    evict(table, [1, 2, 3, 4])
    submitted.flusher.on_step(1)
    table.update([2], 1.0)
    submitted.flusher.on_step(2)
    submitted.release()
    table.update([3], 1.0)
    submitted.flusher.mark_all(generation=1)
    submitted.flusher.on_step(3)
    assert taken(submitted.flushes[-1]) == [0, 2, 3, 5, 6, 7, 8, 9]


def test_more_deletions_than_a_buffer_holds_leave_room_for_rows() -> None:
    """Deletions take half of a buffer at most while rows wait, and no flush is marked before all are out."""
    table = Trained(num_rows=40_000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
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


@settings(max_examples=60, deadline=None)
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
    """At an exact mark the store equals the tables, evicted rows gone; at any mark no row is older than its step."""
    table = VirtualRows("v.weight", 1200, 40) if is_virtual else Trained("v.weight", 1200, 40)
    submitted = Submitted([table], staging_bytes=SMALL, num_shards=2)
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


def test_a_sweep_ends_when_its_deletions_are_out() -> None:
    """While rows go round and round, no mark is given before the deletions that were there when the sweep began."""
    table = Trained(num_rows=40_000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL)
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
