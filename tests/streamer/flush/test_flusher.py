"""When the flusher flushes, and what it takes; more than a buffer holds is `test_flusher_passes.py`'s."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from scripted_flushes import ScriptedFlushes
from text_scripts import Script, scripts
from trainer_tables import SMALL_BYTES, Submitted, Trained, taken

from headrace.schemas.errors import ConfigError, NonFiniteError, UnavailableError
from headrace.streamer.flush.staging import StagingBuffer
from headrace.streamer.taps.tapped_table import TappedTable


@scripts(__file__, "flusher")
def test_scripts(script: Script) -> None:
    """Flushes are as the scripts say."""
    script.run(ScriptedFlushes())


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


def test_messages() -> None:
    """Errors that users see name table and row, or how many rows are left and where they hang."""
    table = Trained("t.weight", row_offset=10)
    submitted = Submitted([table], non_finite="reject")
    table.update([7], float("nan"))
    with pytest.raises(NonFiniteError, match=r"'t\.weight'.*weights.* row 17 "):
        submitted.flusher.on_step(1)
    table.update([7], 0.0)
    for step in (2, 3):
        submitted.flusher.on_step(step)
    table.mark([1, 2])
    with pytest.raises(UnavailableError, match=r"2 rows are not handed over.*shard 0 is behind"):
        submitted.flusher.flush_all(4, 0.01)


def test_row_that_fits_nowhere_is_refused() -> None:
    """A table whose row exceeds a staging buffer or a frame is refused, with the setting to change."""
    table = Trained(num_rows=2, dim=20_000)
    submitted = Submitted([], staging_bytes=SMALL_BYTES)
    with pytest.raises(ConfigError, match="staging_bytes"):
        submitted.flusher.check_tables([table.tapped], max_frame_bytes=2**26)
    submitted = Submitted([])
    with pytest.raises(ConfigError, match="max_frame_bytes"):
        submitted.flusher.check_tables([table.tapped], max_frame_bytes=2**16)


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
