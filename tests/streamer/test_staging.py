"""The two buffers of a flusher, and who waits for one."""

from __future__ import annotations

import threading

from headrace.streamer.staging import StagingPool


def test_closed_pool_wakes_who_waits() -> None:
    """A pool that is closed ends the wait for a buffer at once."""
    pool = StagingPool(2**16)
    assert pool.acquire() is not None
    assert pool.acquire() is not None
    closer = threading.Thread(target=pool.close)
    closer.start()
    assert pool.acquire(60.0) is None
    closer.join()
