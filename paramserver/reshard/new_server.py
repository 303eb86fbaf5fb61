"""Build a server with another number of shards from a running one, and put it in that one's place.

    a snapshot of OLD, cut into M stores ── the logs of OLD's shards behind it ── little is left ──▶ hand-over:
    each shard of OLD offers itself, and takes nothing more ── the logs up to the offers ── the new directory gets
    its name: that is the decision ── it is served, and OLD, which asks, names it for ever

OLD goes on only if the builder says that it has published nothing: after an error, and when it starts again. Nothing is
served here before the decision. Shard 0 is offered first: of two builders, one gets it, and the other gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from headrace.paramserver.ingest.shard_state import ShardState
from headrace.paramserver.log.interface import LogRecord
from headrace.paramserver.reading.follower import ShardFollower, hold_log
from headrace.paramserver.reading.link import Dial, ShardLink, link_all, retry
from headrace.paramserver.reshard.new_shards import NewShards, cut_rows
from headrace.paramserver.rpc.address import Address, format_address, parse_address
from headrace.paramserver.rpc.security import is_loopback
from headrace.paramserver.snapshots.bucket import SnapshotStore
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import SnapshotFiles
from headrace.paramserver.snapshots.new_data_dir import StoreBuilder, check_target
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_snapshot, remove_snapshot
from headrace.paramserver.system.event_loop import background_task, task_group
from headrace.paramserver.system.limits import check_room
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import (
    ConfigError,
    GoneError,
    HeadraceError,
    InvariantError,
    RequestError,
    UnavailableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.predecessors import Predecessor
from headrace.schemas.snapshot_manifest import SnapshotManifest

__all__ = ["build_server"]

_log = logging.getLogger(__name__)

_WORK = "reshard"
_SNAPSHOT_LEASE_S, _SNAPSHOT_TIMEOUT_S = 3600, 600.0
# The old server keeps its log for so long for a builder that is away.
_LOG_LEASE_S = 600.0
_FETCH_BYTES = 8 << 20
_WAIT_S = 1.0
_LOOK_S, _SHOW_S = 0.02, 10.0
# An old server that is away for longer at the start is probably misspelt.
_PATIENCE_S = 60.0
# What may wait to be written as the hand-over begins.
_NEAR_BYTES = 8 << 20
# How long the old shards wait before they ask what has become of their offers, and for how long the hand-over is tried.
_HOLD_MS, _HAND_OVER_S = 60_000, 30.0


async def build_server(
    seeds: Sequence[Address], dial: Dial, target: Path, *, num_shards: int, address: str, archives: bool = False
) -> Predecessor:
    """Build a server's directory from a running server, and take that one's place; return which one that was.

    Args:
        seeds: Addresses of any of its shards.
        dial: Connects as an admin.
        target: The new directory, missing or empty; absolute.
        num_shards: Of the new server.
        address: Of shard 0 of the new server, for clients; it is bound already.
        archives: The new server has an object store; without one, warn where the old server has one.

    Raises:
        ConfigError: The server has that many shards, follows another one or has a replicated log; it cannot reach
            `address`; or `target` is in use.
        ReshardedError: Another server has taken its place before.
        GoneError: The server has removed log that was still needed: its `--log-hold-bytes` was reached.
        StorageError: The disk failed or lacks room.
        HeadraceError: The server refuses, as when it is handed over to somebody else. In all these cases it goes on as
            before.

    Cancellation: the server goes on, unless it was decided already.
    """
    await asyncio.to_thread(check_target, target)
    links = await retry(lambda: link_all(dial, seeds), patience_s=_PATIENCE_S)
    try:
        await _check_source(links, num_shards, address, archives=archives)
        where = ",".join(format_address(*seed) for seed in seeds)
        return await _Builder(links, dial, where, target, num_shards, address).run()
    finally:
        await asyncio.gather(*(link.close() for link in links))


async def _check_source(links: Sequence[ShardLink], num_shards: int, address: str, *, archives: bool) -> None:
    source = f"the server at {links[0].address}"
    if len(links) == num_shards:
        raise ConfigError(
            f"--shards {num_shards}: {source} has as many: to move it, let another server follow it (--follow), and "
            "promote that one"
        )
    if is_loopback(parse_address(address)[0]) and not all(is_loopback(link.host) for link in links):
        raise ConfigError(f"{source} cannot reach this one at {address}: set --advertise-host")
    is_archived = False
    for link in links:
        status = await retry(link.status, patience_s=_PATIENCE_S)
        is_archived |= status.archive is not None
        if status.log is not None:
            raise ConfigError(f"{source} has a replicated log: only servers with a log in files are built anew")
        if status.following is not None:
            raise ConfigError(f"{source} follows {status.following.source}: name that one")
    if is_archived and not archives:
        text = "the archive ends with the old server: the new one has no --object-store, which takes a new prefix"
        fact(_log, logging.WARNING, text, server=links[0].address)


class _Builder:
    """One build. Thread: the event loop's."""

    def __init__(
        self, links: Sequence[ShardLink], dial: Dial, where: str, target: Path, num_shards: int, address: str
    ) -> None:
        self._links, self._dial, self._where = links, dial, where
        self._target, self._num_shards, self._address = target, num_shards, address
        self._copy_id = secrets.token_hex(8)
        self._num_rows = 0  # of the snapshot, by now
        self._is_stopped = False
        self._seqs = [0] * len(links)  # last record of each log that was taken
        self._ends: dict[int, int] = {}  # seq of the offer of each shard that has made one

    async def run(self) -> Predecessor:
        await self._abort()  # what an earlier attempt has left: nothing is published
        with tempfile.TemporaryDirectory(prefix=f".{self._target.name}.", dir=self._target.parent) as folder:
            return await self._build(Path(folder))

    async def _build(self, folder: Path) -> Predecessor:
        manifest = await self._make_snapshot()
        async with contextlib.AsyncExitStack() as stack:
            followers = []
            for link, part in zip(self._links, manifest.parts, strict=True):
                follower = ShardFollower(
                    link,
                    from_seq=part.seq + 1,
                    mark=part.mark,
                    name=_WORK,
                    copy_id=self._copy_id,
                    lease_s=_LOG_LEASE_S,
                    max_bytes=_FETCH_BYTES,
                    wait_s=_WAIT_S,
                )
                followers.append(follower)
                await stack.enter_async_context(hold_log(follower))
                self._seqs[part.shard] = part.seq
            snapshot = await self._fetch(manifest, folder)
            async with background_task(self._show_rows(), name="headrace-reshard-show"):
                cutting = asyncio.ensure_future(asyncio.to_thread(self._cut, snapshot))
                try:
                    builder, states = await asyncio.shield(cutting)
                except asyncio.CancelledError:
                    self._is_stopped = True
                    await asyncio.wait([cutting])
                    if cutting.exception() is None:
                        cutting.result()[0].directory.close()
                    raise
            with builder:
                await asyncio.to_thread(shutil.rmtree, snapshot)
                async with NewShards(builder, states, num_shards=self._num_shards) as new:
                    return await self._take_over(followers, new)

    async def _make_snapshot(self) -> SnapshotManifest:
        """Make a snapshot: on the server's disk, or where no disk has it all, in its object store."""
        is_spread = len({link.host for link in self._links}) > 1
        lease_s = 0 if is_spread else _SNAPSHOT_LEASE_S
        manifest = await create_snapshot(
            self._where, dial=self._dial, at_step=False, timeout_s=_SNAPSHOT_TIMEOUT_S, lease_s=lease_s
        )
        fact(_log, logging.INFO, "the build begins with a snapshot", name=manifest.name, bytes=manifest.size_bytes)
        return manifest

    async def _fetch(self, manifest: SnapshotManifest, folder: Path) -> Path:
        """Fetch a snapshot into a folder; return its own."""
        # The snapshot, its rows anew, and what the logs bring.
        await asyncio.to_thread(check_room, folder, 2 * manifest.size_bytes, what="the rows of the server")
        upload = (await retry(self._links[0].status)).upload
        if manifest.lease_s or upload is None:
            await fetch_snapshot(self._where, folder, dial=self._dial, name=manifest.name)
            await remove_snapshot(self._where, manifest.name, dial=self._dial)
        else:
            store = await asyncio.to_thread(SnapshotStore.of_url, upload.url)
            await asyncio.to_thread(store.fetch, manifest.name, SnapshotFiles(folder))
        return SnapshotFiles(folder).folder_of(manifest.name)

    def _cut(self, snapshot: Path) -> tuple[StoreBuilder, list[ShardState]]:
        """Make the new stores of a snapshot's rows; return them with the state of each old shard. It blocks."""

        def count(num_rows: int) -> None:
            self._num_rows += num_rows
            if self._is_stopped:
                raise UnavailableError("the build was stopped")

        with SnapshotReader(snapshot) as reader:
            states = [ShardState(store.read_meta()) for store in reader.stores]
            builder = cut_rows(reader, states, self._target, num_shards=self._num_shards, work=_WORK, on_rows=count)
            return builder, states

    async def _take_over(self, followers: Sequence[ShardFollower], new: NewShards) -> Predecessor:
        async with task_group() as group:
            tails = [
                group.create_task(self._tail(shard, follower, new), name=f"headrace-reshard-{shard}")
                for shard, follower in enumerate(followers)
            ]
            await self._wait_near(followers, new)
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(_HAND_OVER_S):
                    predecessor = await self._offer_all()
                    await asyncio.gather(*tails)
                    if (taken := tuple(self._seqs)) != predecessor.seqs:
                        raise InvariantError(f"logs → new stores: taken up to {taken}, not to {predecessor.seqs}")
                    await new.finish()
                    if await self._offer_all() != predecessor:
                        raise UnavailableError(f"somebody has let the server at {self._where} go on")
                # Whoever cancels this waits until it is decided.
                await new.publish([predecessor, *self._older()])
            except BaseException as exc:
                if not new.is_published:
                    await asyncio.shield(self._give_up())
                if isinstance(exc, TimeoutError):
                    why = next((f": {link.failure}" for link in self._links if link.failure is not None), "")
                    raise UnavailableError(
                        f"the server at {self._where} was not handed over within {_HAND_OVER_S:g} s{why}"
                    ) from exc
                raise
        num_rows, seconds = self._num_rows + new.num_rows, round(time.monotonic() - began_s, 3)
        fact(_log, logging.INFO, "the server was built", shards=self._num_shards, rows=num_rows, hand_over_s=seconds)
        return predecessor

    async def _tail(self, shard: int, follower: ShardFollower, new: NewShards) -> None:
        """Take a shard's records until its offer."""
        while self._ends.get(shard) != self._seqs[shard]:
            try:
                updates = await follower.fetch()
            except GoneError as exc:
                raise GoneError(f"{exc}; if its log grew too long meanwhile, raise its --log-hold-bytes") from exc
            for update in updates:
                new.take(shard, LogRecord(update.seq, update.epoch, update.header, update.body))
                self._seqs[shard] = update.seq
            await new.wait_below()

    async def _wait_near(self, followers: Sequence[ShardFollower], new: NewShards) -> None:
        """Wait until little is left to take."""
        shown_s, loop = -math.inf, asyncio.get_running_loop()
        while any(follower.is_behind or follower.heard_s == -math.inf for follower in followers):
            if loop.time() - shown_s > _SHOW_S:
                shown_s = loop.time()
                behind = sum(max(each.last_seq + 1 - each.next_seq, 0) for each in followers)
                fact(_log, logging.INFO, "the build catches up", records_behind=behind)
            await asyncio.sleep(_LOOK_S)
        await new.wait_below(_NEAR_BYTES)

    async def _offer_all(self) -> Predecessor:
        """Let all old shards offer themselves; shard 0 first, which only one builder can have."""
        for shard, link in enumerate(self._links):
            request = idl.PromoteShardRequest(shard=shard, to=self._address, hold_ms=_HOLD_MS, shards=self._num_shards)
            # An offer that is repeated is the same one.
            self._ends[shard] = (await retry(partial(link.promote_shard, request))).seq
        seqs = tuple(self._ends[shard] for shard in range(len(self._links)))
        return Predecessor(server_id=self._links[0].hello.server_id, seqs=seqs)

    def _older(self) -> list[Predecessor]:
        found = self._links[0].hello.predecessors or ()
        return [Predecessor(server_id=each.server_id, seqs=tuple(each.seqs)) for each in found]

    async def _abort(self) -> None:
        """Let the old server go on, if it is offered to this address: nothing is published here.

        Raises:
            RequestError: It is offered to another address.
            UnavailableError: A shard is away for long. It may take no updates before the next build.
        """

        async def abort(shard: int, link: ShardLink) -> None:
            request = idl.PromoteShardRequest(shard=shard, aborts=True, to=self._address)
            await retry(partial(link.promote_shard, request), patience_s=_PATIENCE_S)

        aborts = (abort(shard, link) for shard, link in enumerate(self._links))
        # All of them, even if one fails.
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _give_up(self) -> None:
        try:
            await self._abort()
        except RequestError:
            pass  # another builder has it
        except HeadraceError as exc:
            fact(_log, logging.WARNING, "the server may take no updates before the next build", error=str(exc))

    async def _show_rows(self) -> NoReturn:
        while True:
            await asyncio.sleep(_SHOW_S)
            fact(_log, logging.INFO, "rows are cut", rows=self._num_rows)
