"""Which copy answers lookups: switches, losses at any moment, and rebuilding; the copies are fakes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from fake_copies import SPEC, WAIT_S, Begun, FakeBuilder, FakeCopy, made, switch, turns, until

from headrace.paramserver.replica.copy import copies as copies_module
from headrace.paramserver.replica.copy.copies import Copies
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.schemas.errors import ConfigError, GoneError, HeadraceError, SetBackError, StorageError


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_FIRST_PAUSE_S", 1e-9)


async def test_a_copy_that_is_lost_while_the_old_one_is_closed_is_replaced(begun: Begun) -> None:
    """A loss during the end of a switch is noticed."""
    first, second, third = FakeCopy(), FakeCopy(), FakeCopy()
    copies, _ = await begun(first, second, third)
    first.may_close.clear()
    first.lose()
    await asyncio.wait_for(first.closing.wait(), WAIT_S)
    assert copies.current is second.table_set and copies.failure is None
    second.lose()
    assert copies.failure is second.lost
    first.may_close.set()
    await until(lambda: copies.current is third.table_set)
    assert copies.failure is None
    await copies.close()
    assert all(copy.num_closed for copy in (first, second, third))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConfigError("not enough memory")])
async def test_beginning_anew_outlives_any_error(begun: Begun, error: Exception) -> None:
    """After any error of an attempt, which is the replica's failure meanwhile, another one follows."""
    first, last = FakeCopy(), FakeCopy()
    copies, builder = await begun(first, error, last)
    seen: list[str] = []
    build = builder.build

    async def note(*args: Any, **kwargs: Any) -> LiveCopy:
        seen.append(str(copies.failure))
        return await build(*args, **kwargs)

    builder.build = note  # type: ignore[method-assign]
    first.lose()
    await until(lambda: copies.current is last.table_set)
    assert seen[0] == "its place is gone" and str(error.args[-1]) in seen[1]


async def test_what_cannot_be_removed_keeps_no_copy_from_answering(
    begun: Begun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A switch succeeds even if the old copy's files cannot be removed."""
    first, second = FakeCopy(), FakeCopy()
    copies, _ = await begun(first, second)

    def fail() -> None:
        raise StorageError("the directory is gone")

    monkeypatch.setattr(first.table_set, "close", fail)
    await switch(copies, keep_previous=False)
    assert copies.current is second.table_set and copies.failure is None
    assert "the directory is gone" in caplog.text


async def test_a_change_that_came_is_not_told_as_late(begun: Begun) -> None:
    """The deadline covers catching up, not closing the old copy."""
    first, second = FakeCopy(), FakeCopy()
    copies, _ = await begun(first, second)
    first.may_close.clear()
    asyncio.get_running_loop().call_later(0.05, first.may_close.set)
    await switch(copies, keep_previous=False, timeout_s=0.02)
    assert copies.current is second.table_set
    late = FakeCopy(seq=1, target_seq=2)
    copies._builder = cast("Any", FakeBuilder(late))
    with pytest.raises(TimeoutError):
        await switch(copies, timeout_s=0.01)
    assert copies.current is second.table_set and late.num_closed == 1


async def test_a_copy_that_gets_on_is_waited_for() -> None:
    """Any progress, reported by any thread, starts the deadline again."""
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
    """Move a copy; return how often it reported progress meanwhile."""
    told: list[int] = []
    original = builder.on_progress
    builder.on_progress = lambda: told.append(1)
    copy.move(seq, visible)
    await turns()
    builder.on_progress = original
    return len(told)


async def test_a_copy_that_catches_up_is_waited_for() -> None:
    """Only records that the copy needs are progress, including those that the old copy shows."""
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


async def test_the_log_of_a_server_that_was_set_back_is_no_progress_for_ever(begun: Begun) -> None:
    """After a set back only what the server has left counts as progress."""
    first, second = FakeCopy(seq=100, visible=(5, 100)), FakeCopy(seq=0, target_seq=50, visible=None)
    copies, builder = await begun(first, second)
    first.move(100, (5, 100))
    first.lost = SetBackError("record 100 is another")
    switching = asyncio.create_task(switch(copies, timeout_s=5000))
    await until(lambda: second in builder.given)
    assert await _told(second, builder, 50, None) == 1
    assert await _told(second, builder, 90, None) == 0
    second.move(90, (6, 1))
    await switching


async def test_old_snapshots_go_once_another_copy_answers(begun: Begun) -> None:
    """Old snapshots are removed only after a successful switch."""
    first, second = FakeCopy(), FakeCopy(seq=1, target_seq=2)
    copies, builder = await begun(first, second, StorageError("no"))
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


async def test_copies_that_are_lost_soon_are_begun_ever_later(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses grow up to a limit until a copy has lasted a minute."""
    sleep, slept_s = asyncio.sleep, list[float]()
    monkeypatch.setattr(asyncio, "sleep", lambda delay_s: slept_s.append(delay_s) or sleep(0))
    monkeypatch.setattr(copies_module, "_FIRST_PAUSE_S", 2.0)
    monkeypatch.setattr("random.random", lambda: 1.0)  # each pause is its ceiling
    one, two, three, four = (FakeCopy() for _ in range(4))
    copies, _ = await begun(one, *[StorageError("no room")] * 4, two, three, four)
    for lost, num_pauses, next_pause_s in ((one, 5, 10), (two, 6, 10), (three, 6, 2)):
        copies._switched_s -= 60 * (lost is three)
        lost.lose()
        await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
        assert [*filter(None, slept_s)] == [2, 4, 8, 10, 10, 10][:num_pauses]
        assert copies._backoff.next_s() == next_pause_s


async def test_rolling_back_to_a_lost_copy_begins_anew(begun: Begun) -> None:
    """A roll back to a copy that lost its place meanwhile rebuilds it."""
    first, second, third = FakeCopy(), FakeCopy(), FakeCopy()
    copies, _ = await begun(first, second, third)
    await switch(copies)
    first.lose()
    assert copies.failure is None  # the one that answers is not the lost one
    await copies.roll_back()
    await until(lambda: copies.current is third.table_set)
    await copies.close()
    assert all(copy.num_closed for copy in (first, second, third))


async def test_rolling_back_does_not_wait_for_what_cannot_begin(begun: Begun) -> None:
    """A roll back ends a running rebuild at once."""
    first, second, stuck = FakeCopy(), FakeCopy(), FakeCopy(seq=1, target_seq=2)
    copies, builder = await begun(first, second, stuck)
    await switch(copies)
    second.lose()
    await until(lambda: stuck in builder.given)
    async with asyncio.timeout(WAIT_S):
        await copies.roll_back()
    assert copies.current is first.table_set and copies.failure is None
    assert stuck.num_closed == second.num_closed == 1


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_roll_back_that_is_given_up_leaves_a_copy_that_follows(begun: Begun, is_lost: bool) -> None:
    """A cancelled roll back shows the previous copy, and rebuilds it if it is lost."""
    first, second, stuck, last = FakeCopy(), FakeCopy(), FakeCopy(seq=1, target_seq=2), FakeCopy()
    copies, builder = await begun(first, second, stuck, last)
    await switch(copies)
    second.lose()
    await until(lambda: stuck in builder.given)
    if is_lost:
        first.lose()
    stuck.may_close.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await copies.roll_back()
    assert copies.current is first.table_set and copies.failure is first.lost
    stuck.may_close.set()
    if is_lost:
        await until(lambda: copies.current is last.table_set)
    await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
    await copies.close()
    assert all(copy.num_closed for copy in (first, second, stuck)) and builder.results == ([] if is_lost else [last])


async def test_what_fails_behind_a_change_is_no_failure_of_the_copy(
    begun: Begun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Failing to remove old snapshots after a switch is only a warning."""
    copies, builder = await begun(FakeCopy(), FakeCopy())

    async def fail() -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(builder, "remove_old_snapshots", fail)
    builder.given[0].lose()
    await until(lambda: "No locks available" in caplog.text)
    await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
    assert copies.current is builder.given[1].table_set and copies.failure is None


async def test_a_copy_that_was_loaded_meanwhile_ends_the_rebuilding(begun: Begun) -> None:
    """A switch by the user ends the rebuilding of a lost copy."""
    first, loaded = FakeCopy(), FakeCopy(seq=1, target_seq=2)
    copies, builder = await begun(first, loaded)
    switching = asyncio.create_task(switch(copies, keep_previous=False))
    await until(lambda: loaded in builder.given)
    first.lose()
    loaded.move(2, (1, 2))
    await switching
    await until(lambda: copies._rebuilding is not None and copies._rebuilding.done())
    assert copies.current is loaded.table_set and copies.failure is None and not builder.results


async def test_one_copy_is_begun_at_a_time() -> None:
    """A second switch waits for the first, and knows the memory in use."""
    first, second = FakeCopy(seq=1, target_seq=2), FakeCopy()
    copies, builder = made(first, second)
    switching = [asyncio.create_task(switch(copies)) for _ in range(2)]
    await turns()
    assert builder.given == [first]
    first.move(2, (1, 1))
    await asyncio.gather(*switching)
    assert builder.given == [first, second] and copies.current is second.table_set
    assert (first.beside, second.beside) == ([], [first])  # it is not compared with one that a thread changes
    assert builder.held_bytes == [0, first.table_set.size_bytes] and first.table_set.size_bytes > 0
    await copies.close()
    assert first.num_closed == second.num_closed == 1


async def test_a_copy_that_failed_gives_its_disk_back_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed copy frees its disk before its successor is built; a whole one stays until the switch."""
    first, second, third = FakeCopy(), FakeCopy(), FakeCopy()
    copies, builder = made(first, second, third)
    freed: list[tuple[str, int]] = []
    for name, copy in (("first", first), ("second", second)):
        monkeypatch.setattr(copy.table_set, "close", lambda name=name: freed.append((name, len(builder.given))))
    await switch(copies)
    first.lose()
    await until(lambda: copies.current is second.table_set and not copies._dropped)
    second.table_set.failure = StorageError("no space left on device")
    second.lose()
    await until(lambda: copies.current is third.table_set and not copies._dropped)
    assert freed == [("first", 2), ("second", 2), ("second", 3)]
    await copies.close()


@pytest.mark.parametrize(
    ("seq", "step", "loss"),
    [(60, 4, GoneError("the log ends at record 60")), (120, 5, SetBackError("record 100 is another"))],
    ids=["its log ends before", "it has overtaken"],
)
async def test_a_server_that_was_set_back_is_taken_up(begun: Begun, seq: int, step: int, loss: HeadraceError) -> None:
    """After a set back, what the server has is enough to switch."""
    first = FakeCopy(seq=100, visible=(5, 100))
    copies, builder = await begun(first, FakeCopy(seq=50, target_seq=seq, visible=(step, 10)))
    first.lose(loss)
    await until(lambda: len(builder.given) == 2)
    assert copies.current is first.table_set
    second = builder.given[1]
    second.move(seq, (step, 20))
    await until(lambda: copies.current is second.table_set)


async def test_what_the_old_copy_shows_meanwhile_is_waited_for(begun: Begun) -> None:
    """Progress of the old copy during a switch is not taken for a set back."""
    first = FakeCopy(seq=100, visible=(5, 100))
    copies, builder = await begun(first, FakeCopy(seq=50, target_seq=100, visible=(5, 50)))
    switching = asyncio.create_task(switch(copies))
    await until(lambda: len(builder.given) == 2)
    second = builder.given[1]
    first.move(110, (5, 110))
    second.move(100, (5, 100))
    await turns()
    assert copies.current is first.table_set
    second.move(110, (5, 110))
    await switching
    assert copies.current is second.table_set


async def test_a_server_that_goes_on_is_waited_for(begun: Begun) -> None:
    """No lookup goes back in time if the log has what the old copy shows."""
    first = FakeCopy(seq=100, visible=(5, 100))
    copies, builder = await begun(first, FakeCopy(seq=50, target_seq=100, visible=(5, 50)))
    first.lose()
    await until(lambda: len(builder.given) == 2)
    second = builder.given[1]
    second.move(100, (5, 99))
    await asyncio.sleep(0)
    assert copies.current is first.table_set
    second.tail.visible_seq = 99  # a row that the first one shows may be in the last record
    second.table_set.visible = (5, 100)
    second._changed.set()
    await turns()
    assert copies.current is first.table_set
    second.move(100, (5, 100))
    await until(lambda: copies.current is second.table_set)


async def test_another_store_takes_over_once_it_has_what_lookups_find(begun: Begun) -> None:
    """Another store takes over only once it has the tables and an ended step."""
    first = FakeCopy(server_id="one", seq=9, visible=(1, 9))
    copies, builder = await begun(first, FakeCopy(server_id="two", visible=(0, -1), tables=False))
    first.lose()
    await until(lambda: "has no table 't' yet" in str(copies.failure))
    second = builder.given[1]
    second.table_set.add_tables([SPEC])
    second.move(1, (1, -1))
    await until(lambda: "has no step that is ended yet" in str(copies.failure))
    assert copies.current is first.table_set
    second.move(2, (1, 1))
    await until(lambda: copies.current is second.table_set)
    assert copies.failure is None


async def test_another_store_without_any_run_takes_over_at_once(begun: Begun) -> None:
    """Another store that was filled from files has no steps to wait for."""
    first, second = FakeCopy(server_id="one", seq=9, visible=(1, 9)), FakeCopy(server_id="two", visible=(0, -1))
    copies, _ = await begun(first, second)
    first.lose()
    await until(lambda: copies.current is second.table_set)
