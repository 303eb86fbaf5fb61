"""Evicted rows: which are deleted, when, and what step marks promise about them."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scripted_flushes import ScriptedFlushes
from text_scripts import Script, scripts
from trainer_tables import SMALL_BYTES, Submitted, Trained, VirtualRows, deleted_of, rows_of


@scripts(__file__, "deleted_rows")
def test_scripts(script: Script) -> None:
    """Deletions are as the scripts say."""
    script.run(ScriptedFlushes())


def test_sizes() -> None:
    """A flush counts rows and deletions with their bytes, and both are cut into messages of a bounded size."""
    table = Trained(row_offset=1000)
    submitted = Submitted([table], num_shards=3)
    table.update(range(40), 1.0)
    table.tapped.evict(torch.arange(29))
    submitted.flusher.on_step(1)
    (flush,) = submitted.flushes
    assert (flush.num_rows, flush.size_bytes) == (40, 11 * 24 + 29 * 8)
    assert len(deleted_of(flush, 3, max_bytes=500)) == 29
    for shard in range(3):
        assert all(message.size_bytes <= 500 for message in flush.messages(shard, 500))


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
            table.tapped.evict(torch.tensor(evicted, dtype=torch.int64))
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
