"""When a new copy may take over: its server was set back, goes on, or has another store; the copies are made up."""

from __future__ import annotations

import asyncio

import pytest
from fake_copies import SPEC, FakeCopy, made, switch, until

from headrace.paramserver.replica import copies as copies_module
from headrace.schemas.errors import GoneError, HeadraceError, SetBackError


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_FIRST_PAUSE_S", 1e-9)


@pytest.mark.parametrize(
    ("seq", "step", "loss"),
    [(60, 4, GoneError("the log ends at record 60")), (120, 5, SetBackError("record 100 is another"))],
    ids=["its log ends before", "it has overtaken"],
)
async def test_a_server_that_was_set_back_is_taken_up(seq: int, step: int, loss: HeadraceError) -> None:
    """It may never come to the records and the step that lookups see, which are gone there: what it has is enough."""
    first = FakeCopy(seq=100, visible=(5, 100))
    copies, builder = made(first, FakeCopy(seq=50, target_seq=seq, visible=(step, 10)))
    await switch(copies)
    first.lose(loss)
    await until(lambda: len(builder.given) == 2)
    assert copies.current is first.generation
    second = builder.given[1]
    second.move(seq, (step, 20))
    await until(lambda: copies.current is second.generation)
    await copies.close()


async def test_what_the_old_copy_shows_meanwhile_is_waited_for() -> None:
    """The old copy goes on after the server was asked how far it is: that is no server that was set back."""
    first = FakeCopy(seq=100, visible=(5, 100))
    copies, builder = made(first, FakeCopy(seq=50, target_seq=100, visible=(5, 50)))
    await switch(copies)
    switching = asyncio.create_task(switch(copies))
    await until(lambda: len(builder.given) == 2)
    second = builder.given[1]
    first.move(110, (5, 110))
    second.move(100, (5, 100))
    for _ in range(10):
        await asyncio.sleep(0)
    assert copies.current is first.generation
    second.move(110, (5, 110))
    await switching
    assert copies.current is second.generation
    await copies.close()


async def test_a_server_that_goes_on_is_waited_for() -> None:
    """Where the log has what lookups see, no lookup goes back behind it."""
    first = FakeCopy(seq=100, visible=(5, 100))
    copies, builder = made(first, FakeCopy(seq=50, target_seq=100, visible=(5, 50)))
    await switch(copies)
    first.lose()
    await until(lambda: len(builder.given) == 2)
    second = builder.given[1]
    second.move(100, (5, 99))
    await asyncio.sleep(0)
    assert copies.current is first.generation
    second.tail.visible_seq = 99  # a row that the first one shows may be in the last record
    second.generation.visible = (5, 100)
    second._changed.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert copies.current is first.generation
    second.move(100, (5, 100))
    await until(lambda: copies.current is second.generation)
    await copies.close()


async def test_another_store_takes_over_once_it_has_what_lookups_find() -> None:
    """An empty server at the address takes nothing from lookups; one with the tables and a step that was ended does."""
    first = FakeCopy(server_id="one", seq=9, visible=(1, 9))
    copies, builder = made(first, FakeCopy(server_id="two", visible=(0, -1), tables=False))
    await switch(copies)
    first.lose()
    await until(lambda: "has no table 't' yet" in str(copies.failure))
    second = builder.given[1]
    second.generation.add_tables([SPEC])
    second.move(1, (1, -1))
    await until(lambda: "has no step that is ended yet" in str(copies.failure))
    assert copies.current is first.generation
    second.move(2, (1, 1))
    await until(lambda: copies.current is second.generation)
    assert copies.failure is None
    await copies.close()


async def test_another_store_without_any_run_takes_over_at_once() -> None:
    """One that was filled from files has no step, and none to wait for."""
    first, second = FakeCopy(server_id="one", seq=9, visible=(1, 9)), FakeCopy(server_id="two", visible=(0, -1))
    copies, _ = made(first, second)
    await switch(copies)
    first.lose()
    await until(lambda: copies.current is second.generation)
    await copies.close()
