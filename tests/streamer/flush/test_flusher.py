"""When the flusher flushes, and what it takes; more than a buffer holds is `test_flusher_passes.py`'s."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from trainer_tables import ROWWISE, SMALL_BYTES, WIDE, Submitted, Trained, VirtualRows, deleted_of, rows_of, taken

from headrace.kernels.dirty_sets import DirtyIds, DirtyRows
from headrace.schemas.errors import ConfigError, NonFiniteError, UnavailableError
from headrace.streamer.flush.staging import StagingBuffer
from headrace.streamer.taps.tapped_table import TappedTable


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


def test_block_waits_for_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `block` a step goes on when a buffer becomes free, and sends what is dirty."""
    table = Trained()
    submitted = Submitted([table], policy="block")
    for step in (1, 2):
        table.mark([step])
        submitted.flusher.on_step(step)
    table.mark([3])
    releaser = threading.Thread(target=submitted.release)
    reserve = submitted.pool.reserve
    waits = []

    def reserve_and_release(timeout_s: float = 0.0) -> StagingBuffer | None:
        if timeout_s:
            waits.append(timeout_s)
            releaser.start()
        return reserve(timeout_s)

    monkeypatch.setattr(submitted.pool, "reserve", reserve_and_release)
    submitted.flusher.on_step(3)
    releaser.join()
    assert waits == [600.0]
    assert taken(submitted.flushes[2]) == [3]


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
    second = submitted.flushes[1]
    assert (second.dirty_since_s, second.time_us - second.oldest_us) == (101.0, 9_000_000)
    assert [message.oldest_us for message in second.messages(0, 1000)] == [second.oldest_us]


def test_steps_of_a_pause_are_as_old_as_they_are() -> None:
    """What changed in a pause goes out as changes of then, not of the step after it."""
    now = [100.0]
    table = Trained()
    submitted = Submitted([table], clock=lambda: now[0])
    submitted.flusher.on_step(0)
    table.mark([1])
    submitted.flusher.pass_step(1)
    now[0] = 130.0
    submitted.flusher.on_step(2)
    flush = submitted.flushes[-1]
    assert (taken(flush), flush.time_us - flush.oldest_us) == ([1], 30_000_000)


def test_costly_flushes_are_rare() -> None:
    """After flushes of 10 ms the next one is due a second later at one percent, after one of 5 s ten seconds later."""
    now = [100.0]
    table = Trained()
    submitted = Submitted([table], max_cost_percent=1, clock=lambda: now[0])
    submitted.flusher.on_step(0)  # the first after tables were added is free
    submitted.release()
    flushed_at = []
    for step in range(1, 160):
        now[0] += 0.1001
        table.mark([step % 50])
        submitted.cost = lambda: now.__setitem__(0, now[0] + (5.0 if flushed_at[-1:] == [21] else 0.01))
        submitted.flusher.on_step(step)
        if submitted.flushes[-1].step == step:
            flushed_at.append(step)
            submitted.release()
    assert flushed_at == [1, 11, 21, 31, 132, 142, 152]
    assert submitted.flusher.pace.is_cost_bound
    assert [flush.is_cost_bound for flush in submitted.flushes] == [False, False, *[True] * 6]
    assert submitted.flushes[0].cost_percent == 0
    assert submitted.flushes[-1].cost_percent == pytest.approx(21.9, abs=0.1)


def test_rows_go_out_when_they_would_be_too_old_at_the_next_step() -> None:
    """With a second to be fresh in, steps of 0.3 s are taken together by threes, counted from the first one's end."""
    now = [100.0]
    table = Trained()
    submitted = Submitted([table], freshness_s=1, clock=lambda: now[0])
    sent = []
    for step in range(10):
        now[0] += 0.3
        table.mark([step])
        submitted.flusher.on_step(step)
        if submitted.flushes[-1].step == step:
            sent.append(taken(submitted.flushes[-1]))
        submitted.release()
    assert sent == [[0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert not submitted.flusher.pace.is_cost_bound


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
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    table.mark(range(2000))
    submitted.flusher.on_step(1)
    seen = taken(submitted.flushes[0])
    submitted.release()
    submitted.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        submitted.flusher.on_step(2)
    submitted.error = None
    assert submitted.pool.num_free == 2
    for step in (3, 4):
        submitted.flusher.on_step(step)
        seen += taken(submitted.flushes[-1])
        submitted.release()
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


def test_a_recorded_step_is_marked_again() -> None:
    """A step that has an exact mark gets another one, which says that it is recorded; later ones do not say so."""
    table = Trained()
    submitted = Submitted([table])
    table.mark([3])
    submitted.flusher.on_step(5)
    submitted.flusher.flush_all(5, 1.0)
    assert len(submitted.flushes) == 1
    submitted.flusher.flush_all(5, 1.0, is_recorded=True)
    submitted.release()
    submitted.flusher.on_step(6)
    marks = [flush.mark for flush in submitted.flushes]
    assert [(mark.step, mark.is_exact_cut, mark.is_recorded) for mark in marks if mark is not None] == [
        (5, True, False),
        (5, True, True),
        (6, True, False),
    ]


def test_flush_all_fails_when_no_buffer_becomes_free() -> None:
    """Without a free buffer `flush_all` says how many rows are left, and where it hangs."""
    table = Trained(num_rows=3000, dim=WIDE)
    submitted = Submitted([table], staging_bytes=SMALL_BYTES)
    table.mark(range(3000))
    with pytest.raises(UnavailableError, match=r"\d+ rows are not handed over.*shard 0 is behind"):
        submitted.flusher.flush_all(1, 0.01)
    assert len(submitted.flushes) == 2


def test_row_that_fits_nowhere_is_refused() -> None:
    """A table whose row exceeds a staging buffer or a frame is refused, with the setting to change."""
    table = Trained(num_rows=2, dim=20_000)
    submitted = Submitted([], staging_bytes=SMALL_BYTES)
    with pytest.raises(ConfigError, match="staging_bytes"):
        submitted.flusher.check_tables([table.tapped], max_frame_bytes=2**26)
    submitted = Submitted([])
    with pytest.raises(ConfigError, match="max_frame_bytes"):
        submitted.flusher.check_tables([table.tapped], max_frame_bytes=2**16)


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
        spec=spec, num_local_rows=50, weights=lambda: plain.weights, states=dict, identities=lambda: identities
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
