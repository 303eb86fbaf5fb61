"""Which copy answers: switches, losses at every moment, and beginning anew; the copies are made up."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fake_copies import WAIT_S, FakeBuilder, FakeCopy, made, switch, until

from headrace.paramserver.replica import copies as copies_module
from headrace.paramserver.replica.copies import Copies
from headrace.paramserver.replica.followed import Followed
from headrace.schemas.errors import ConfigError, SetBackError, StorageError


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_FIRST_PAUSE_S", 1e-9)


async def test_a_copy_that_is_lost_while_the_old_one_is_closed_is_replaced() -> None:
    """A loss is never overlooked, also when it comes before the last change of copies has ended."""
    first, second, third = FakeCopy(), FakeCopy(), FakeCopy()
    copies, _ = made(first, second, third)
    await switch(copies)
    first.may_close.clear()
    first.lose()
    await asyncio.wait_for(first.closing.wait(), WAIT_S)
    assert copies.current is second.generation and copies.failure is None
    second.lose()
    assert copies.failure is second.lost
    first.may_close.set()
    await until(lambda: copies.current is third.generation)
    assert copies.failure is None
    await copies.close()
    assert all(copy.num_closed for copy in (first, second, third))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("not enough memory")])
async def test_beginning_anew_outlives_any_error(error: Exception) -> None:
    """Whatever an attempt fails with is the replica's failure, and the next attempt comes."""
    first, last = FakeCopy(), FakeCopy()
    copies, builder = made(first, error, last)
    await switch(copies)
    seen: list[str] = []
    build = builder.build

    async def note(*args: Any, **kwargs: Any) -> Followed:
        seen.append(str(copies.failure))
        return await build(*args, **kwargs)

    builder.build = note  # type: ignore[method-assign]
    first.lose()
    await until(lambda: copies.current is last.generation)
    assert seen[0] == "its place is gone" and str(error.args[-1]) in seen[1]
    await copies.close()


async def test_what_cannot_be_removed_keeps_no_copy_from_answering(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of the old copy that cannot be removed are said, and the change is one all the same."""
    first, second = FakeCopy(), FakeCopy()
    copies, _ = made(first, second)
    await switch(copies)

    def fail() -> None:
        raise StorageError("the directory is gone")

    monkeypatch.setattr(first.generation, "close", fail)
    await switch(copies, keep_previous=False)
    assert copies.current is second.generation and copies.failure is None
    assert "the directory is gone" in caplog.text
    await copies.close()


async def test_a_change_that_came_is_not_told_as_late() -> None:
    """The deadline is for catching up: closing the old copy may take longer."""
    first, second = FakeCopy(), FakeCopy()
    copies, _ = made(first, second)
    await switch(copies)
    first.may_close.clear()
    asyncio.get_running_loop().call_later(0.05, first.may_close.set)
    await switch(copies, keep_previous=False, timeout_s=0.02)
    assert copies.current is second.generation
    late = FakeCopy(seq=1, target_seq=2)
    copies._builder = cast("Any", FakeBuilder(late))
    with pytest.raises(TimeoutError):
        await switch(copies, timeout_s=0.01)
    assert copies.current is second.generation and late.num_closed == 1
    await copies.close()


async def test_a_copy_that_gets_on_is_waited_for() -> None:
    """The deadline is for one that hangs: it begins anew with all that comes, which any thread may tell of."""
    copies, builder = made()
    loop, wrong = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: wrong.append(context))
    async with asyncio.timeout(1000) as deadline:
        with copies._extending(deadline, 5000):
            await asyncio.to_thread(builder.on_progress)
            await until(lambda: (deadline.when() or 0) > loop.time() + 4000)
            late = builder.on_progress
            late()
    late()  # a thread that has not heard of the end
    builder.on_progress()
    await asyncio.sleep(0)
    assert not wrong
    await copies.close()


async def _told(copy: FakeCopy, builder: FakeBuilder, seq: int, visible: Any) -> int:
    """Let a copy come to a place; return how often it was told meanwhile that it got on."""
    told: list[int] = []
    original = builder.on_progress
    builder.on_progress = lambda: told.append(1)
    copy.move(seq, visible)
    for _ in range(10):
        await asyncio.sleep(0)
    builder.on_progress = original
    return len(told)


async def test_a_copy_that_catches_up_is_waited_for() -> None:
    """Records that it lacks are progress, also those that only the old copy had; what comes after them is none."""
    first = FakeCopy(seq=50, visible=(5, 50))
    told: list[int] = []
    builder = FakeBuilder(first, FakeCopy(seq=0, target_seq=50, visible=None))
    copies = Copies(cast("Any", builder), lambda: told.append(1))
    await switch(copies)
    first.move(50, (5, 50))
    told.clear()
    switching = asyncio.create_task(switch(copies, timeout_s=5000))
    await until(lambda: len(builder.given) == 2)
    second = builder.given[1]
    first.move(100, (5, 100))
    for seq in (20, 50, 80, 100):  # the server had 50 when the copy began, and lookups see 100 by now
        assert await _told(second, builder, seq, None) == 1
    assert await _told(second, builder, 100, None) == await _told(second, builder, 5000, None) == 0
    first.move(200, (5, 110))
    assert await _told(second, builder, 6000, None) == 1 and not told
    builder.on_progress()
    assert told == [1]  # who made the replica hears of it
    second.move(6000, (5, 110))
    await switching
    await copies.close()


async def test_the_log_of_a_server_that_was_set_back_is_no_progress_for_ever() -> None:
    """What lookups see of the time that is gone is not waited for: only what the server had counts."""
    first, second = FakeCopy(seq=100, visible=(5, 100)), FakeCopy(seq=0, target_seq=50, visible=None)
    copies, builder = made(first, second)
    await switch(copies)
    first.move(100, (5, 100))
    first.lost = SetBackError("record 100 is another")
    switching = asyncio.create_task(switch(copies, timeout_s=5000))
    await until(lambda: second in builder.given)
    assert await _told(second, builder, 50, None) == 1
    assert await _told(second, builder, 90, None) == 0
    second.move(90, (6, 1))
    await switching
    await copies.close()


async def test_old_snapshots_go_once_another_copy_answers() -> None:
    """Not before, and not when the other copy has failed: what it began from may be needed again."""
    first, second = FakeCopy(), FakeCopy(seq=1, target_seq=2)
    copies, builder = made(first, second, StorageError("no"))
    await switch(copies)
    assert builder.num_cleared == 1
    switching = asyncio.create_task(switch(copies))
    await until(lambda: len(builder.given) == 2)
    assert builder.num_cleared == 1
    second.move(2, (1, 2))
    await switching
    assert builder.num_cleared == 2
    with pytest.raises(StorageError):
        await switch(copies)
    assert builder.num_cleared == 2
    await copies.close()


async def test_copies_that_are_lost_soon_are_begun_ever_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a copy that has answered for a minute was a success: behind others pauses grow, up to a bound."""
    sleep, slept_s = asyncio.sleep, list[float]()
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: slept_s.append(delay_s) or sleep(0))
    monkeypatch.setattr(copies_module, "_FIRST_PAUSE_S", 2.0)
    monkeypatch.setattr("random.random", lambda: 1.0)  # each pause is its ceiling
    one, two, three, four = (FakeCopy() for _ in range(4))
    copies, _ = made(one, *[StorageError("no room")] * 4, two, three, four)
    await switch(copies)
    for lost, num_pauses, next_pause_s in ((one, 5, 10), (two, 6, 10), (three, 6, 2)):
        copies._changed_s -= 60 * (lost is three)
        lost.lose()
        await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
        assert [*filter(None, slept_s)] == [2, 4, 8, 10, 10, 10][:num_pauses]
        assert copies._backoff.next_s() == next_pause_s
    await copies.close()


async def test_rolling_back_to_a_lost_copy_begins_anew() -> None:
    """The copy before may have lost its place while it was kept: it answers, and another one is begun."""
    first, second, third = FakeCopy(), FakeCopy(), FakeCopy()
    copies, _ = made(first, second, third)
    await switch(copies)
    await switch(copies)
    first.lose()
    assert copies.failure is None  # the one that answers is not the lost one
    await copies.roll_back()
    await until(lambda: copies.current is third.generation)
    await copies.close()
    assert all(copy.num_closed for copy in (first, second, third))


async def test_rolling_back_does_not_wait_for_what_cannot_begin() -> None:
    """While another copy does not catch up, the one before is there at once, and that attempt ends."""
    first, second, stuck = FakeCopy(), FakeCopy(), FakeCopy(seq=1, target_seq=2)
    copies, builder = made(first, second, stuck)
    await switch(copies)
    await switch(copies)
    second.lose()
    await until(lambda: stuck in builder.given)
    async with asyncio.timeout(WAIT_S):
        await copies.roll_back()
    assert copies.current is first.generation and copies.failure is None
    assert stuck.num_closed == second.num_closed == 1
    await copies.close()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_roll_back_that_is_given_up_leaves_a_copy_that_follows(is_lost: bool) -> None:
    """Whoever cancels it has lookups see the one before; and where that is lost, another one is begun."""
    first, second, stuck, last = FakeCopy(), FakeCopy(), FakeCopy(seq=1, target_seq=2), FakeCopy()
    copies, builder = made(first, second, stuck, last)
    await switch(copies)
    await switch(copies)
    second.lose()
    await until(lambda: stuck in builder.given)
    if is_lost:
        first.lose()
    stuck.may_close.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await copies.roll_back()
    assert copies.current is first.generation and copies.failure is first.lost
    stuck.may_close.set()
    if is_lost:
        await until(lambda: copies.current is last.generation)
    await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
    await copies.close()
    assert all(copy.num_closed for copy in (first, second, stuck)) and builder.results == ([] if is_lost else [last])


async def test_what_fails_behind_a_change_is_no_failure_of_the_copy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy that answers follows: that old snapshots cannot be removed is said, and nothing else."""
    copies, builder = made(FakeCopy(), FakeCopy())
    await switch(copies)

    async def fail() -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(builder, "remove_old_snapshots", fail)
    builder.given[0].lose()
    await until(lambda: "No locks available" in caplog.text)
    await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
    assert copies.current is builder.given[1].generation and copies.failure is None
    await copies.close()


async def test_a_copy_that_was_loaded_meanwhile_ends_the_rebuilding() -> None:
    """Where somebody has switched to another copy, the lost one needs no other successor."""
    first, loaded = FakeCopy(), FakeCopy(seq=1, target_seq=2)
    copies, builder = made(first, loaded)
    await switch(copies)
    switching = asyncio.create_task(switch(copies, keep_previous=False))
    await until(lambda: loaded in builder.given)
    first.lose()
    loaded.move(2, (1, 2))
    await switching
    await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
    assert copies.current is loaded.generation and copies.failure is None and not builder.results
    await copies.close()


async def test_one_copy_is_begun_at_a_time() -> None:
    """A second switch waits for the first: two copies beside the present one would not fit; it knows what is held."""
    first, second = FakeCopy(seq=1, target_seq=2), FakeCopy()
    copies, builder = made(first, second)
    switching = [asyncio.create_task(switch(copies)) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert builder.given == [first]
    first.move(2, (1, 1))
    await asyncio.gather(*switching)
    assert builder.given == [first, second] and copies.current is second.generation
    assert (first.beside, second.beside) == ([], [first])  # it is not compared with one that a thread changes
    assert builder.held_bytes == [0, first.generation.size_bytes] and first.generation.size_bytes > 0
    await copies.close()
    assert first.num_closed == second.num_closed == 1


async def test_a_copy_that_failed_gives_its_disk_back_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers nothing takes no room from its successor; a copy that is whole stays until the change."""
    first, second, third = FakeCopy(), FakeCopy(), FakeCopy()
    copies, builder = made(first, second, third)
    freed: list[tuple[str, int]] = []
    for name, copy in (("first", first), ("second", second)):
        monkeypatch.setattr(copy.generation, "close", lambda name=name: freed.append((name, len(builder.given))))
    await switch(copies)
    first.lose()
    await until(lambda: copies.current is second.generation and not copies._dropped)
    second.generation.failure = StorageError("no space left on device")
    second.lose()
    await until(lambda: copies.current is third.generation and not copies._dropped)
    assert freed == [("first", 2), ("second", 2), ("second", 3)]
    await copies.close()
