"""The public class of serving: a copy of the tables that follows the server and answers lookups while it does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.reader import EmbeddingReader
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.paramserver.replica.followed import Followed
from headrace.paramserver.replica.freshness import Freshness
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.loading import load_live, load_snapshot
from headrace.paramserver.replica.table import ReplicaTable, size_of_table
from headrace.paramserver.security import Token
from headrace.paramserver.shard_link import Dial
from headrace.paramserver.snapshot_client import fetch_snapshot
from headrace.paramserver.snapshot_files import SnapshotFiles, verify_snapshot
from headrace.schemas.errors import (
    ConfigError,
    GoneError,
    HeadraceError,
    RequestError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.snapshot_manifest import SnapshotManifest
from headrace.schemas.tables import TableSpec

__all__ = ["EmbeddingReplica"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Ids = npt.NDArray[np.int64]

# Between attempts to begin anew after a place in the log was lost.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_CLOSE_TIMEOUT_S = 10.0


class EmbeddingReplica:
    """Embedding tables in this process's memory, as the trainer has them, milliseconds later.

        with EmbeddingReplica("127.0.0.1:7601", consistency="step") as replica:
            rows = replica.lookup("user.weight", [3, 5, 8])

    It begins from a snapshot or by reading the running server, then follows each shard's update log on a thread of its
    own. A server that restarts is found again. When the log that it needs is gone, or the store is another one, it
    begins anew aside, and changes over when the new copy has caught up; lookups go on in the old one.

    Thread: any, for every method.

    Attributes:
        num_missing: Ids that lookups have not found, by fqn.
    """

    def __init__(
        self,
        address: str,
        *,
        snapshot: Path | None = None,
        config: ReplicaConfig | None = None,
        open_timeout_s: float = 60.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
        **settings: Any,
    ) -> None:
        """Connect, load, and return when the copy has caught up with the server.

        Args:
            address: `host:port` of any shard.
            snapshot: Directory of a snapshot to begin from; None reads what the server has, or its newest snapshot
                when there are tables of virtual ids.
            config: Settings; None takes them from `settings`.
            open_timeout_s: Give up when it has not caught up by then, seconds.
            ssl_context: For TLS, as `client_tls_context` makes it.
            server_hostname: Name that every shard's certificate has; each shard's own host when None.
            token: For a server that asks for one.
            **settings: Fields of `ReplicaConfig`, without `config`.

        Raises:
            ConfigError: A setting, the address or the snapshot is wrong, or there is not enough memory.
            UnauthorizedError: The server asks for other credentials.
            UnavailableError: The server is not there, or its run has not stood exactly at a step in time.
            GoneError: The server has no log from the snapshot on.
            CorruptionError: The snapshot is damaged.
        """
        if config is not None and settings:
            raise ConfigError("settings stand in `config` or as arguments, not both")
        self.num_missing: dict[str, int] = {}
        self._config = config or ReplicaConfig(**settings)
        self._address = address
        self._dial = Dial(
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            token=token,
            timeout_s=self._config.timeout_s,
        )
        self._changed = threading.Condition()
        self._copies: list[Followed] = []  # the current one last
        self._current: Generation | None = None
        self._rebuilding: asyncio.Task[None] | None = None
        self._failure: HeadraceError | None = None
        self._is_closed = False
        self._switching = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-replica", daemon=True)
        self._thread.start()
        try:
            self._run(self._switch(lambda: self._build(snapshot), keep_previous=False), open_timeout_s)
        except BaseException:
            self.close()
            raise

    # Looking up.

    def lookup(self, fqn: str, ids: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
        """Return rows of one table.

        Args:
            fqn: Table.
            ids: Row ids, any shape.

        Returns:
            `[*ids.shape, dim]` in the table's dtype, on the CPU, a copy.

        Raises:
            UnknownTableError: The replica has no such table.
            RowRangeError: An id is no row of the table.
            RequestError: A row is missing and the policy is `error`.
        """
        return self.lookup_many({fqn: ids})[fqn]

    def lookup_many(self, ids_of: Mapping[str, npt.ArrayLike | torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return rows of several tables, all as of one moment; see `lookup`."""
        wanted = {fqn: _as_ids(ids) for fqn, ids in ids_of.items()}

        def gather(table: ReplicaTable, slots: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding(slots, table.weights)

        found = self.look([(fqn, ids.reshape(-1), gather) for fqn, ids in wanted.items()])
        return {fqn: rows.view(*ids.shape, -1) for (fqn, ids), rows in zip(wanted.items(), found, strict=True)}

    def look(
        self, wanted: list[tuple[str, _Ids, Callable[[ReplicaTable, torch.Tensor], torch.Tensor]]]
    ) -> list[torch.Tensor]:
        """Return what functions make of slots of tables, all as of one moment.

        Args:
            wanted: (fqn, int64[n] row ids, function of the table and int64[n] slots of its weights). A function may be
                called twice; its result must not share memory with the table.

        Raises:
            See `lookup`.
        """
        generation = self._generation
        for fqn, ids, _ in wanted:
            self._table(generation, fqn).spec.check_row_ids(ids)

        def look() -> list[tuple[torch.Tensor, npt.NDArray[np.bool_]]]:
            found = []
            for fqn, ids, make in wanted:
                table = generation.tables[fqn]
                slots = table.slots_of(ids)
                missing = table.missing(slots)
                found.append((make(table, torch.from_numpy(slots)), missing))
            return found

        found = generation.gate.read(look)
        for (fqn, ids, _), (_, missing) in zip(wanted, found, strict=True):
            self._count_missing(fqn, ids, missing)
        return [rows for rows, _ in found]

    @property
    def tables(self) -> dict[str, TableSpec]:
        """Tables that it has, by fqn."""
        return {fqn: table.spec for fqn, table in self._generation.tables.items()}

    def num_rows(self, fqn: str) -> int:
        """Return how many rows of a table are present.

        Raises:
            UnknownTableError: The replica has no such table.
        """
        return self._table(self._generation, fqn).num_present

    # Freshness.

    @property
    def epoch(self) -> int:
        """Epoch of the run whose steps `step` counts; 0 before the first."""
        return (self._generation.visible or (0, -1))[0]

    @property
    def step(self) -> int:
        """Step up to which every update is visible, in all shards and tables; -1 before the first."""
        return (self._generation.visible or (0, -1))[1]

    @property
    def failure(self) -> HeadraceError | None:
        """Why the replica is not kept up to date at the moment; None while it is."""
        return self._failure

    def freshness(self) -> list[Freshness]:
        """Return how far behind each shard's part is."""
        return self._generation.freshness()

    def wait_for(self, step: int, timeout_s: float, *, epoch: int | None = None) -> None:
        """Return when every update up to a step is visible.

        Args:
            step: Of the newest run.
            timeout_s: Deadline, seconds.
            epoch: Wait for this run's step, or a newer run's; None for whatever run is the newest.

        Raises:
            UnavailableError: It is not by then; the message says what is, and why.
        """

        def is_visible() -> bool:
            visible = self._generation.visible or (0, -1)
            return visible >= (visible[0] if epoch is None else epoch, step)

        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closed or is_visible(), timeout_s):
                why = f"; {self._failure}" if self._failure is not None else ""
                raise UnavailableError(f"step {step} is not visible within {timeout_s:g} s, step {self.step} is{why}")

    # Switching.

    def load_snapshot(self, folder: Path, *, keep_previous: bool = True, timeout_s: float = 600.0) -> None:
        """Begin anew from a snapshot, aside, catch up, and change over; lookups go on in the old copy until then.

        Args:
            folder: Directory of the snapshot.
            keep_previous: Keep the old copy up to date too, for `roll_back`; costs its memory.
            timeout_s: Give up when the new copy has not caught up by then, seconds; the old one stays.

        Raises:
            ConfigError: There is no snapshot, or not enough memory for both copies; said before anything is loaded.
            CorruptionError: It is damaged.
            GoneError: The server has no log from there on, or is another one.
            UnavailableError: The new copy did not catch up in time.
        """
        self._run(self._switch(lambda: self._build(folder), keep_previous=keep_previous), timeout_s)

    def roll_back(self) -> None:
        """Change back to the copy before the last `load_snapshot`, and drop the present one.

        Raises:
            ConfigError: It was not kept.
        """
        self._run(self._roll_back(), _CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Stop following and free the connections; lookups fail from now on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._current = None
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _generation(self) -> Generation:
        generation = self._current
        if generation is None:
            raise UnavailableError("the replica is closed")
        return generation

    def _table(self, generation: Generation, fqn: str) -> ReplicaTable:
        table = generation.tables.get(fqn)
        if table is None:
            known = ", ".join(sorted(generation.tables)[:8]) or "none"
            raise UnknownTableError(f"no table {fqn!r} in this replica; it has {known}")
        return table

    def _count_missing(self, fqn: str, ids: _Ids, missing: npt.NDArray[np.bool_]) -> None:
        number = int(np.count_nonzero(missing))
        if number:
            self.num_missing[fqn] = self.num_missing.get(fqn, 0) + number
            if self._config.missing == "error":
                first = int(ids[np.argmax(missing)])
                raise RequestError(f"table {fqn!r}: row {first} is not there ({number} of {ids.size} are missing)")

    def _run(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        async def bounded() -> _T:
            async with asyncio.timeout(timeout_s):
                return await work

        if self._is_closed:
            work.close()
            raise UnavailableError("the replica is closed")
        try:
            return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()
        except TimeoutError as exc:
            raise UnavailableError(f"the replica has not caught up with {self._address} in {timeout_s:g} s") from exc

    # What follows runs on the replica's own thread.

    async def _switch(self, build: Callable[[], Coroutine[Any, Any, Followed]], *, keep_previous: bool) -> None:
        async with self._switching:
            copy = await build()
            try:
                await copy.wait_until(lambda: _has_caught_up(copy, self._current))
            except BaseException:
                await copy.close()
                raise
            keep = self._copies[-1:] if keep_previous else []
            dropped = [old for old in self._copies if old not in keep]
            self._copies = [*keep, copy]
            self._current, self._failure = copy.generation, None
            self._notify()
            for old in dropped:
                await old.close()

    async def _roll_back(self) -> None:
        async with self._switching:
            if len(self._copies) < 2:
                raise ConfigError("there is no previous copy to roll back to")
            dropped = self._copies.pop()
            self._current, self._failure = self._copies[-1].generation, self._copies[-1].lost
            self._notify()
            await dropped.close()

    async def _close(self) -> None:
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.wait([self._rebuilding])
        for copy in self._copies:
            await copy.close()

    async def _build(self, snapshot: Path | None) -> Followed:
        """Return a new copy that has begun to follow."""
        reader = await EmbeddingReader.connect(
            self._address,
            timeout_s=self._dial.timeout_s,
            ssl_context=self._dial.ssl_context,
            server_hostname=self._dial.server_hostname,
            token=self._dial.token,
        )
        try:
            if snapshot is not None:
                generation = await self._load(snapshot)
            elif all(spec.num_rows for spec in reader.tables.values() if self._is_wanted(spec)):
                self._check_memory(list(reader.tables.values()), 0)
                generation = await load_live(reader, is_by_step=self._is_by_step, make_table=self._make_table)
            else:
                generation = await self._load_newest()
            server_id = reader.links[0].hello.server_id
            if generation.server_id != server_id:
                raise GoneError(f"the snapshot is of store {generation.server_id}, the server has {server_id}")
            targets = [status.accepted_seq for status in await reader.status()]
        except BaseException:
            await reader.close()
            raise
        return Followed(
            generation,
            reader,
            self._config,
            target_seqs=targets,
            on_change=self._notify,
            on_lost=self._on_lost,
        )

    async def _load(self, folder: Path) -> Generation:
        manifest: SnapshotManifest = await asyncio.to_thread(verify_snapshot, folder)
        self._check_memory(list(manifest.tables.values()), manifest.size_bytes)
        return await asyncio.to_thread(
            load_snapshot, folder, manifest, is_by_step=self._is_by_step, make_table=self._make_table
        )

    async def _load_newest(self) -> Generation:
        with contextlib.ExitStack() as stack:
            directory = self._config.snapshot_dir
            if directory is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-")))
            try:
                manifest = await fetch_snapshot(self._address, directory, dial=self._dial)
            except GoneError as exc:
                raise GoneError(
                    f"{exc}, and tables of virtual ids cannot be read without one: headrace snapshot create"
                ) from exc
            return await self._load(SnapshotFiles(directory).folder_of(manifest.name))

    @property
    def _is_by_step(self) -> bool:
        return self._config.consistency == "step"

    def _is_wanted(self, spec: TableSpec) -> bool:
        return self._config.tables is None or spec.fqn in self._config.tables

    def _make_table(self, spec: TableSpec) -> ReplicaTable | None:
        return ReplicaTable(spec, default=self._config.defaults.get(spec.fqn)) if self._is_wanted(spec) else None

    def _check_memory(self, specs: list[TableSpec], snapshot_bytes: int) -> None:
        """Refuse a copy that will not fit beside those that are there."""
        wanted = [spec for spec in specs if self._is_wanted(spec)]
        needed = sum(size_of_table(spec) for spec in wanted)
        if any(not spec.num_rows for spec in wanted):
            needed += snapshot_bytes  # their rows are in there, and more
        held = sum(copy.generation.size_bytes for copy in self._copies)
        limit = self._config.max_memory_bytes
        free = _free_memory_bytes() if limit is None else limit - held
        if needed > free:
            raise ConfigError(
                f"replica: a new copy takes about {needed >> 20} MiB, {max(free, 0) >> 20} MiB are free "
                f"beside the {held >> 20} MiB of the present one"
            )

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _on_lost(self, copy: Followed, error: HeadraceError) -> None:
        if self._is_closed or not self._copies or copy is not self._copies[-1]:
            return
        self._failure = error
        _log.warning("the replica is not up to date: %s; beginning anew", error)
        if self._rebuilding is None or self._rebuilding.done():
            self._rebuilding = asyncio.create_task(self._rebuild(), name="headrace-replica-rebuild")

    async def _rebuild(self) -> None:
        """Begin anew until it succeeds; lookups go on in the copy that was left behind."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self._switch(lambda: self._build(None), keep_previous=False)
            except HeadraceError as exc:
                self._failure = exc
                _log.warning("the replica could not begin anew: %s", exc)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _has_caught_up(copy: Followed, old: Generation | None) -> bool:
    """Return whether a new copy has what the server had when it began, and shows what the old copy shows."""
    new = copy.generation
    if new.visible is None or any(tail.seq < seq for tail, seq in zip(new.tails, copy.target_seqs, strict=True)):
        return False
    if old is None or old.server_id != new.server_id or len(old.tails) != len(new.tails):
        return True
    is_behind = old.visible is not None and new.visible < old.visible
    return not is_behind and all(a.visible_seq >= b.visible_seq for a, b in zip(new.tails, old.tails, strict=True))


def _as_ids(ids: npt.ArrayLike | torch.Tensor) -> _Ids:
    if isinstance(ids, torch.Tensor):
        ids = ids.detach().cpu().numpy()
    return np.asarray(ids, np.int64, order="C")


def _free_memory_bytes() -> int:
    """Return what the machine can give without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("replica: /proc/meminfo does not say what is free; set max_memory_bytes")
