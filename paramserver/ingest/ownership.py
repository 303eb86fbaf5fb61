"""Decide which run may write a table. No I/O.

A hello of a trainer or a backfill claims the tables that it names. Shard 0 answers before the other shards hear of
them, so it decides between two runs that claim a table at the same moment. An owner is (run, epoch), and each writer
has an epoch of its own: of two claims, every shard keeps the one with the higher epoch.

A run keeps its tables until it has ended; a lost connection or a killed process ends nothing. A backfill gives way to
any trainer, and to another backfill unless it is connected. It takes no table of a trainer that has not ended, nor one
that another run has owned since it began: rows of that run are newer than its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.paramserver.log.sessions import Session, Sessions
from headrace.paramserver.store.catalog import Catalog, Owner
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import FencedError, OwnedError
from headrace.schemas.tables import TableSpec

__all__ = ["NOT_FOR_BACKFILLS", "check_owners", "claimable"]

NOT_FOR_BACKFILLS = (
    "a backfill writes no table of a trainer that has not ended: close its streamer (if it was killed, start the run "
    "again first), or load the rows into its model"
)


def claimable(
    catalog: Catalog,
    sessions: Sessions,
    specs: Iterable[TableSpec],
    run: str,
    epoch: int,
    *,
    is_backfill: bool = False,
    takes_over: bool = False,
    now_us: int,
) -> list[str]:
    """Return the tables whose owner changes to (run, epoch) with a hello; `now_us` is the wall clock.

    Raises:
        OwnedError: Another run owns a table and keeps it.
        FencedError: Another run has claimed a table in a newer epoch.
    """
    names: list[str] = []
    for spec in specs:
        owner = catalog.owner_of(spec.fqn)
        if owner is not None and owner.run != run:
            if is_backfill:
                _check_backfill(sessions, spec.fqn, owner, run, epoch, now_us)
            elif not (takes_over or owner.is_backfill or owner.has_ended):
                raise OwnedError(
                    f"table {spec.fqn!r} belongs to run {owner.run!r}, {_last_heard(sessions, owner.run, now_us)}; "
                    f"give run {run!r} a model of its own (model=…), or close the other run's streamer; if that run "
                    "was killed, pass takes_over=True"
                )
            elif owner.epoch >= epoch:
                raise _taken(spec.fqn, owner, run)
        if owner is None or owner.epoch < epoch:
            names.append(spec.fqn)
    return names


def check_owners(catalog: Catalog, names: Iterable[str], session: Session) -> None:
    """Check that a client's run may write rows of tables.

    Raises:
        FencedError: Another run has taken a table over from a trainer.
        OwnedError: Another run owns a table that a client writes that is no trainer.
    """
    for name in names:
        owner = catalog.owner_of(name)
        if owner is None or owner.run == session.run:
            continue
        if not session.is_trainer:
            raise OwnedError(
                f"table {name!r} belongs to run {owner.run!r} and no longer to {session.run!r}, whose rows it takes no "
                "more; rows sent before count where the new owner has written none"
            )
        raise _taken(name, owner, session.run)


def _check_backfill(sessions: Sessions, name: str, owner: Owner, run: str, epoch: int, now_us: int) -> None:
    """Raise `OwnedError` if a backfill may not take a table from another run."""
    whose = f"table {name!r} belongs to run {owner.run!r}, {_last_heard(sessions, owner.run, now_us)}"
    if not (owner.is_backfill or owner.has_ended):
        raise OwnedError(f"{whose}; {NOT_FOR_BACKFILLS}")
    if owner.epoch >= (sessions.epoch_of(run) or epoch):
        raise OwnedError(
            f"{whose}, and has written it since this backfill began; to replace its rows, begin anew with --again"
        )
    if owner.is_backfill and not owner.has_ended and _is_connected(sessions, owner.run):
        raise OwnedError(f"{whose}: another backfill; wait until it has ended")


def _taken(name: str, owner: Owner, run: str) -> FencedError:
    if owner.is_backfill:
        return FencedError(
            f"table {name!r}: backfill {owner.run!r} has begun since this trainer of run {run!r} started: start it "
            "again, and it takes the table",
            epoch=owner.epoch,
        )
    return FencedError(
        f"table {name!r}: run {owner.run!r} has taken it over from run {run!r}; stop this trainer (start it again once "
        "that run has ended), or give it a model of its own (model=…)",
        epoch=owner.epoch,
    )


def _is_connected(sessions: Sessions, run: str) -> bool:
    return any(session.num_connections for session in sessions if session.run == run)


def _last_heard(sessions: Sessions, run: str, now_us: int) -> str:
    writers = [session for session in sessions if session.run == run]
    if not writers:
        return "whose sessions are forgotten"
    newest = max(writers, key=lambda session: (session.has_begun, session.epoch, session.time_us))
    connected = "which is connected" if _is_connected(sessions, run) else "which is not connected"
    if not newest.is_trainer:
        return connected
    if newest.step < 0:
        return f"{connected} and has ended no step"
    return f"{connected} and ended step {newest.step} {format_seconds(max(now_us - newest.time_us, 0) / 1e6)} ago"
