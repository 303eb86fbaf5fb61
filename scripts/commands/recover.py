"""The command `headrace restore`: a server, or a shard of it, made again from its object store."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Annotated

import typer

from headrace.paramserver.archive.points import RestorePoint
from headrace.paramserver.archive.recovery import RestoredShard, restore_server
from headrace.paramserver.system.object_store import ObjectStore
from headrace.scripts.commands.terminal import option, show_bytes

__all__ = ["restore", "restore_with_progress"]


def restore(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server's --object-store: s3://, gs://, az:// or file:///.")
    ],
    *,
    data: Annotated[Path, option("Directory of the server.", "DIR", "--data")],
    at: Annotated[
        str | None, option("Go back to `step=N`, `time=2026-01-31T12:00:00` (UTC) or `seq=N`.", "POINT")
    ] = None,
    shard: Annotated[
        list[int] | None, option("Only this shard, into the directory of the others; may be repeated.", "N", "--shard")
    ] = None,
) -> None:
    """Make a server again from its object store: the newest snapshot and the archived log behind it, all checked.

    Without --at everything that was archived is there, and each trainer that lives sends what is missing. With --at all
    shards are cut where they have the last step at or before the point; what was archived after it is given up.
    """
    point = None if at is None else RestorePoint.parse(at)
    for restored in restore_with_progress(ObjectStore.of_url(url), data, at=point, shards=shard):
        print(_describe(restored))
    print(f"Next: headrace serve --data {shlex.quote(str(data))} --object-store {shlex.quote(url)}")


def restore_with_progress(
    store: ObjectStore, data: Path, *, at: RestorePoint | None = None, shards: list[int] | None = None
) -> list[RestoredShard]:
    """Restore a server, with a bar on a terminal; see `restore_server`."""
    with contextlib.ExitStack() as stack:
        advance = None

        def begin(size_bytes: int) -> None:
            nonlocal advance
            advance = stack.enter_context(show_bytes("Restoring", size_bytes)).advance

        def count(num_bytes: int) -> None:
            if advance is not None:
                advance(num_bytes)

        return restore_server(store, data, at=at, shards=shards, on_size=begin, on_progress=count)


def _describe(restored: RestoredShard) -> str:
    source = "the whole log" if restored.snapshot is None else f"snapshot {restored.snapshot}"
    end = f"up to record {restored.seq}"
    if (point := restored.point) is not None:
        end += f", where step {point.step} of epoch {point.epoch} has ended"
        end += "" if point.is_exact else ", with some newer rows"
    return f"Shard {restored.shard}: {source} and log {end}."
