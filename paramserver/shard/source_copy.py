"""A copy of a shard that follows a source: the same records at the same positions, and the rows that they make.

The source is another server's shard (`following.py`), or the stream of the shard's own replicated log (`standby.py`).
Either way the copy begins with a snapshot, and with the records behind it; when the source lacks the record that comes
next, it begins anew. It answers readers meanwhile (`follower_service.py`), until it takes over from the source.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.paramserver.config.server_settings import ShardConfig
from headrace.paramserver.log.interface import ReplicatedLog
from headrace.paramserver.reading.follower import ShardFollower, hold_log
from headrace.paramserver.reading.link import ShardLink
from headrace.paramserver.rpc.shard_places import ShardPlace, ShardPlaces
from headrace.paramserver.shard.hand_over import peer_dial
from headrace.paramserver.snapshots.directory import mapped_errors
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_newest_part
from headrace.paramserver.system.durable import fsync_path
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import GoneError, HeadraceError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import ShardPart, shard_folder

if TYPE_CHECKING:
    from headrace.paramserver.shard.sampler import ShardParts

__all__ = ["LEASE_S", "SourceCopy", "check_above"]

_log = logging.getLogger(__name__)

LEASE_S = 600.0
"""The source keeps its log for so long for a copy that is away, within its own bound."""
# ON DISK: of a part of a snapshot while it is fetched.
_INCOMING = "incoming"
# Between attempts to begin.
_AGAIN_S = 5.0
_SNAPSHOT_TIMEOUT_S = 600.0
_MAX_MS = 2**62


class SourceCopy(ABC):
    """Keeps one shard's log and store what the source's are. Thread: the event loop's.

    Attributes:
        failure: Why it does not follow at present; None while it does.
        num_restarts: How often it has begun anew since the process began.
        stands: Set once it answers readers for as long as somebody else has the shard.
        applied_seq: What its store had applied when that was opened last.
        parts: Log and store that it answers from; None before.
    """

    def __init__(self, config: ShardConfig, *, copy_id: str, has_begun: bool) -> None:
        """`copy_id` tells the source which lease is this copy's; the source's records continue it if it `has_begun`."""
        self.failure: str | None = None
        self.num_restarts = 0
        self.stands = asyncio.Event()
        self.applied_seq = 0
        self.parts: ShardParts | None = None
        self._config, self._copy_id, self._has_begun = config, copy_id, has_begun
        self._name = "follower" if config.node is None else f"node {config.node}"  # to the source

    @property
    @abstractmethod
    def term(self) -> int:
        """In which the shard is, as far as it is known; 0 for none."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Host and port of the shard that takes the updates, or is followed; as far as it is known."""

    @property
    @abstractmethod
    def source_seq(self) -> int:
        """Last durable seq that the source has reported; 0 before the first."""

    @property
    @abstractmethod
    def lag_s(self) -> float:
        """For how long it has lacked a record that it knows of; 0 if it lacks none."""

    @property
    @abstractmethod
    def knowledge_age_s(self) -> float:
        """How long ago it had all that the source had, over all copies between; inf before the first time."""

    @property
    def knowledge_age_ms(self) -> int:
        """The same in milliseconds, as it goes over the wire; a very long time before the first time."""
        return round(self.knowledge_age_s * 1000) if math.isfinite(self.knowledge_age_s) else _MAX_MS

    @property
    @abstractmethod
    def places(self) -> list[ShardPlace]:
        """Where readers of this copy find each shard, itself included, with terms as far as they are known."""

    @property
    def places_of_file(self) -> list[ShardPlace]:
        """Where the settings have each shard, and this copy."""
        config = self._config
        nodes = config.nodes or (None,) * config.num_shards
        return [ShardPlace(host, port, node=node) for (host, port), node in zip(config.addresses, nodes, strict=True)]

    def status(self) -> Any:
        """Return the `idl.FollowingStatus`."""
        return idl.FollowingStatus(
            source=self.source,
            source_seq=self.source_seq,
            lag_ms=round(self.lag_s * 1000),
            knowledge_age_ms=self.knowledge_age_ms,
            failure=self._hindrance(),
            num_restarts=self.num_restarts,
        )

    @abstractmethod
    def _hindrance(self) -> str | None:
        """Return why it does not follow at present; None while it does."""

    @abstractmethod
    def lead(self, request: Any) -> ShardPlaces | None:
        """Return where a client that says hello finds the shards; None if it is answered here.

        Raises:
            UnavailableError: Whoever takes the updates is to be asked.
            RequestError: The same, for good.
        """

    def check_here(self) -> None:  # noqa: B027 - a source that has moved is followed
        """Raise `UnavailableError` once the shard goes on elsewhere, so that this copy never hears of it."""

    async def begin(self) -> None:
        """Make the directory a copy that log records can continue, unless it is one. Waits for the source.

        Raises:
            ConfigError: The source is another server, or has another number of shards.
            StorageError: The disk failed, or is full.

        Cancellation: the next call begins again.
        """
        if self._has_begun:
            return
        while True:
            try:
                await self._fetch_copy()
                await self._note_begun(True)
                self.failure = None
                return
            except (GoneError, UnavailableError) as exc:
                if str(exc) != self.failure:
                    fact(_log, logging.WARNING, "the shard waits for a beginning", error=str(exc))
                self.failure = str(exc)
            await asyncio.sleep(_AGAIN_S)

    async def begin_anew(self, why: HeadraceError) -> None:
        """Give the copy up, durably: the next `begin` makes another one. REQUIRES: log and store are closed."""
        fact(_log, logging.WARNING, "the shard begins anew", error=str(why))
        self.num_restarts += 1
        await self._note_begun(False)

    async def _note_begun(self, has_begun: bool) -> None:
        self._has_begun = has_begun

    @abstractmethod
    async def _fetch_copy(self) -> None:
        """Put a store, or nothing, where log records can continue."""

    @abstractmethod
    async def follow(self, parts: ShardParts) -> tuple[int | None, ReplicatedLog | None]:
        """Keep log and store what the source's are, until the shard takes over.

        Returns the last record before its own, if it comes from another server; and the log with its own, if that is
        another one, which begins there.

        Raises:
            GoneError: The source lacks the next record, or was set back: begin anew.
            ConfigError: The source is another server.
            HeadraceError: The source refuses for good, or cannot be followed.

        Cancellation: what was appended stays.
        """

    @abstractmethod
    async def check_ahead(self, from_seq: int) -> None:
        """Find out why somebody asks for what is beyond this shard's log: the source decides.

        Raises:
            SetBackError: The source's log ends before it, too: it was set back.
            UnavailableError: The source has it: this shard is behind; or the source is away. Ask again.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connection to the source. Idempotent."""

    def _follower_from(self, link: ShardLink, from_seq: int, mark: int | None) -> ShardFollower:
        return ShardFollower(
            link, from_seq=from_seq, mark=mark, name=self._name, copy_id=self._copy_id, lease_s=LEASE_S
        )

    def _clear_incoming(self) -> None:
        """Remove what an earlier attempt to begin has left. Thread: any; it blocks."""
        with mapped_errors(self._config.directory), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._config.directory / _INCOMING)

    async def _fetch_part(self, link: ShardLink, *, above_seq: int = -1) -> bool:
        """Make the newest snapshot of a shard this copy's store; return False if there is none that can be followed.

        One of `above_seq` or before cannot.
        """
        async with contextlib.AsyncExitStack() as stack:

            async def keep_log(part: ShardPart) -> None:
                check_above(part, above_seq)
                await stack.enter_async_context(hold_log(self._follower_from(link, part.seq + 1, part.mark)))

            try:
                return await self._move_in(
                    lambda incoming: fetch_newest_part(link, incoming, shard=self._config.shard, keep_log=keep_log)
                )
            except GoneError as exc:  # of a time that is gone, or its log is
                fact(_log, logging.WARNING, "the source's newest snapshot cannot be followed", error=str(exc))
                return False

    async def _move_in(self, fetch: Callable[[Path], Awaitable[ShardPart | None]]) -> bool:
        """Make the part that `fetch` puts into a folder this copy's store, in the place of what is there."""
        directory = self._config.directory
        part = await fetch(directory / _INCOMING)
        if part is None:
            return False
        await asyncio.to_thread(_replace_store, directory, part.shard)
        fact(_log, logging.INFO, "the shard begins with a snapshot", seq=part.seq, bytes=part.size_bytes)
        return True

    async def _make_snapshot(self, link: ShardLink) -> None:
        """Have the source make a snapshot, from which other shards and other copies may begin too.

        Raises:
            UnavailableError: The source cannot, or does so for another shard of this server just now.
        """
        dial = peer_dial(self._config, role=idl.Role.ADMIN)
        try:
            await create_snapshot(link.address, dial=dial, at_step=False, timeout_s=_SNAPSHOT_TIMEOUT_S)
        except HeadraceError as exc:
            raise UnavailableError(
                f"{link.address} has removed its first records, and no snapshot from which a copy could begin could be "
                f"made there: {exc}"
            ) from exc


def check_above(part: ShardPart, seq: int) -> None:
    """Raise `GoneError` if a snapshot has nothing that a copy with `seq` lacks."""
    if part.seq <= seq:
        raise GoneError(f"the newest snapshot has seq {part.seq}, and this copy {seq}")


def _replace_store(directory: Path, shard: int) -> None:
    """Make a fetched part the shard's store, durably, in the place of store and log.

    A crash in between leaves a store that the source's records do not continue, or none: then the shard begins anew.
    The log's directory stays: without it, the shard's disk would seem not to be mounted.
    """
    with mapped_errors(directory):
        for path in (directory / "log").iterdir():
            path.unlink()
        fsync_path(directory / "log")
        with contextlib.suppress(FileNotFoundError):
            (directory / "store").rename(directory / _INCOMING / "replaced")
        (directory / _INCOMING / shard_folder(shard)).rename(directory / "store")
        fsync_path(directory)
        shutil.rmtree(directory / _INCOMING)
        fsync_path(directory)
