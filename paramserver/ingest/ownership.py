"""Decide which run may train a table. No I/O.

A trainer's hello claims the tables that it names. Shard 0 answers before the other shards hear of them, so it decides
between two runs that claim a table at the same moment. An owner is (run, epoch), and each trainer has an epoch of its
own: of two takeovers, every shard keeps the one with the higher epoch. Rows that a new owner writes are therefore newer
than all that the old one wrote.

Replay and backfill write rows with versions of their own into tables that somebody names to them; they claim none.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Catalog
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import FencedError, OwnedError
from headrace.schemas.tables import TableSpec

__all__ = ["check_owners", "claimable"]


def claimable(
    catalog: Catalog,
    sessions: Sessions,
    specs: Iterable[TableSpec],
    run: str,
    epoch: int,
    *,
    takes_over: bool,
    now_us: int,
) -> list[str]:
    """Return the tables whose owner changes to (run, epoch) with a trainer's hello; `now_us` is the wall clock.

    Raises:
        OwnedError: Another run owns a table, and this one does not take over.
        FencedError: Another run has taken a table over in a newer epoch.
    """
    names: list[str] = []
    for spec in specs:
        owner = catalog.owner_of(spec.fqn)
        if owner is not None and owner.run != run:
            if not takes_over:
                raise OwnedError(
                    f"table {spec.fqn!r} belongs to run {owner.run!r}, {_last_heard(sessions, owner.run, now_us)}; "
                    f"give run {run!r} a model of its own (model=…), or stop the other run and pass takes_over=True"
                )
            if owner.epoch >= epoch:
                raise _taken(spec.fqn, owner.run, run, owner.epoch)
        if owner is None or owner.epoch < epoch:
            names.append(spec.fqn)
    return names


def check_owners(catalog: Catalog, names: Iterable[str], run: str) -> None:
    """Raise FencedError if another run owns one of the tables whose rows a trainer sends."""
    for name in names:
        owner = catalog.owner_of(name)
        if owner is not None and owner.run != run:
            raise _taken(name, owner.run, run, owner.epoch)


def _taken(name: str, owner: str, run: str, epoch: int) -> FencedError:
    return FencedError(
        f"table {name!r}: run {owner!r} has taken it over from run {run!r}; stop this trainer, or give it a model of "
        "its own (model=…)",
        epoch=epoch,
    )


def _last_heard(sessions: Sessions, run: str, now_us: int) -> str:
    ranks = [session for session in sessions if session.run == run and session.is_trainer]
    if not ranks:
        return "whose sessions are forgotten"
    newest = max(ranks, key=lambda session: (session.has_begun, session.epoch, session.time_us))
    connected = "which is connected" if any(session.num_connections for session in ranks) else "which is not connected"
    if newest.step < 0:
        return f"{connected} and has ended no step"
    return f"{connected} and ended step {newest.step} {format_seconds(max(now_us - newest.time_us, 0) / 1e6)} ago"
