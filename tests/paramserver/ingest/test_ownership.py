"""Which run may train a table, on one shard."""

from __future__ import annotations

import pytest
from table_commands import TableCommands, spec_of
from text_scripts import Script, scripts

from headrace.paramserver.ingest.ownership import claimable
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Catalog, Owner
from headrace.schemas.errors import OwnedError


@scripts(__file__, "ownership")
def test_ownership(script: Script) -> None:
    """The first run owns a table until another takes it over; then the former owner is fenced."""
    script.run(TableCommands())


@pytest.mark.parametrize(
    ("heard", "says"),
    [
        ({}, "which is not connected and has ended no step; "),
        ({"num_connections": 1, "step": 40, "time_us": 60_000_000}, "which is connected and ended step 40 30 s ago; "),
        (None, "whose sessions are forgotten; "),
    ],
)
def test_messages(heard: dict[str, int] | None, says: str) -> None:
    """The refusal says whether the owner is still alive: its connection, and its last step by its own clock."""
    catalog, sessions = Catalog({}), Sessions({})
    catalog.add([spec_of("x")])
    catalog.claim(["x"], Owner("a", 1))
    if heard is not None:
        session = sessions.open("a", "rank0", 1, 0, 1)
        for field, value in heard.items():
            setattr(session, field, value)
    with pytest.raises(OwnedError, match=f"^table 'x' belongs to run 'a', {says}"):
        claimable(catalog, sessions, [spec_of("x")], "b", 2, takes_over=False, now_us=90_000_000)
