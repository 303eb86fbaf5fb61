import asyncio
import time

from headrace.paramserver.process.loop_probe import LoopProbe


async def _until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (the timer is what the test is about)
            await asyncio.sleep(0)


async def test_a_callback_that_blocks_is_a_pause_of_its_length():
    """A loop that is blocked for 50 ms has had a pause of nearly that."""
    async with LoopProbe() as probe:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.05:
            pass
        await _until(lambda: probe.worst_pause_s > 0.04)


async def test_a_pause_is_forgotten_after_the_window():
    """A pause that is older than the window does not count any more."""
    async with LoopProbe(window_s=0.12) as probe:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.3:
            pass
        await _until(lambda: probe.worst_pause_s > 0.2)
        await _until(lambda: probe.worst_pause_s < 0.2)


async def test_it_leaves_no_timer_behind():
    """After its `async with` no timer of the probe is left."""
    async with LoopProbe() as probe:
        pass
    assert probe._timer is not None
    assert probe._timer.cancelled()
