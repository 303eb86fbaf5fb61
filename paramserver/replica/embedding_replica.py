"""The public class of serving: a copy of the tables that follows the server and answers lookups while it does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.replica.audit import ReplicaAuditReport, audit_table, digest_table, why_left_out
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.paramserver.replica.copy_builder import CopyBuilder
from headrace.paramserver.replica.disk_table import DiskTable
from headrace.paramserver.replica.followed import Followed
from headrace.paramserver.replica.freshness import Freshness
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.hot_rows import HotRowStats
from headrace.paramserver.replica.identity_lookup import look_by_identity
from headrace.paramserver.replica.table import ReplicaTable, default_row
from headrace.paramserver.security import Token
from headrace.paramserver.shard_link import Dial
from headrace.paramserver.table_digest import TableDigest
from headrace.schemas.errors import (
    ConfigError,
    HeadraceError,
    RequestError,
    StorageError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.tables import TableSpec

__all__ = ["EmbeddingReplica", "Looked"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Ids = npt.NDArray[np.int64]

Looked = tuple[torch.Tensor, npt.NDArray[np.bool_]]
"""What a look at a table gives: `[rows or bags, dim]`, and bool[n], which of the ids are missing."""

# Between attempts to begin anew after a place in the log was lost.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_CLOSE_TIMEOUT_S = 10.0
_DIGEST_TIMEOUT_S = 600.0


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
        self._dropped: list[Followed] = []  # to be closed
        self._current: Generation | None = None
        self._rebuilding: asyncio.Task[None] | None = None
        self._failure: HeadraceError | None = None
        self._is_closed = False
        self._switching = asyncio.Lock()
        self._builder = CopyBuilder(address, self._dial, self._config, on_change=self._notify, on_lost=self._on_lost)
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

        def gather(table: ReplicaTable, ids: _Ids) -> Looked:
            return table.gather(ids)

        found = self.look([(fqn, ids.reshape(-1), gather) for fqn, ids in wanted.items()])
        return {
            fqn: rows.view(*ids.shape, rows.shape[-1]) for (fqn, ids), rows in zip(wanted.items(), found, strict=True)
        }

    def lookup_by_identity(self, fqn: str, identities: npt.ArrayLike | torch.Tensor) -> torch.Tensor:
        """Return the rows of one table that raw ids are mapped to (zero-collision hashing).

        An identity belongs to the row that was last written with it, and to none when that row has another identity
        by now or is deleted; then it is missing, as a row would be.

        Args:
            fqn: Table with identities.
            identities: Raw ids, any shape; -1 is none.

        Returns:
            `[*identities.shape, dim]` in the table's dtype, on the CPU, a copy.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: The table has no identities; or one has no row and the policy is `error`.
        """
        wanted = _as_ids(identities)

        def look(generation: Generation) -> Looked:
            spec = self._table(generation, fqn).spec
            default = default_row(spec, self._config.defaults.get(fqn))
            return look_by_identity(generation, fqn, wanted.reshape(-1), default)

        rows, missing = self._with_generation(look)
        self._count_missing(fqn, wanted.reshape(-1), missing, what="identity")
        return rows.view(*wanted.shape, rows.shape[-1])

    def find_rows(self, fqn: str, identities: npt.ArrayLike | torch.Tensor) -> _Ids:
        """Return the row that each raw id is mapped to; see `lookup_by_identity`.

        Args:
            fqn: Table with identities.
            identities: Raw ids, any shape; -1 is none.

        Returns:
            int64 of the same shape; -1 where no row has the identity.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: The table has no identities.
        """
        wanted = _as_ids(identities)

        def find(generation: Generation) -> _Ids:
            self._table(generation, fqn)
            of_table = generation.identities.get(fqn)
            if of_table is None:
                raise RequestError(f"table {fqn!r} has no identities; its rows are looked up by their row ids")
            return generation.gate.read(lambda: of_table.find(wanted.reshape(-1)))

        return self._with_generation(find).reshape(wanted.shape)

    def look(self, wanted: Sequence[tuple[str, _Ids, Callable[[ReplicaTable, _Ids], Looked]]]) -> list[torch.Tensor]:
        """Return what functions make of rows of tables, all as of one moment.

        Args:
            wanted: (fqn, int64[n] row ids, function of the table and the ids: `ReplicaTable.gather` or `pool`). A
                function may be called twice; its result must not share memory with the table.

        Raises:
            HeadraceError: As of `lookup`.
        """
        return self._with_generation(lambda generation: self._look(generation, wanted))

    def _with_generation(self, look: Callable[[Generation], _T]) -> _T:
        while True:
            generation = self._generation
            try:
                found = look(generation)
                if generation.failure is not None:
                    raise StorageError(f"the replica's copy is not whole any more: {generation.failure}")
                return found
            except (UnavailableError, StorageError):
                # A copy on disk that was changed for another meanwhile is closed; this one has failed.
                if generation is self._current:
                    raise

    def _look(
        self, generation: Generation, wanted: Sequence[tuple[str, _Ids, Callable[[ReplicaTable, _Ids], Looked]]]
    ) -> list[torch.Tensor]:
        for fqn, ids, _ in wanted:
            self._table(generation, fqn).spec.check_row_ids(ids)

        def look() -> list[Looked]:
            return [make(generation.tables[fqn], ids) for fqn, ids, make in wanted]

        found = generation.gate.read(look)
        for (fqn, ids, _), (_, missing) in zip(wanted, found, strict=True):
            self._count_missing(fqn, ids, missing)
        return [rows for rows, _ in found]

    def prefetch(self, fqn: str, ids: npt.ArrayLike | torch.Tensor) -> None:
        """Have rows of a table on disk read into its hot rows, by other threads; of a table in memory do nothing.

        Args:
            fqn: Table.
            ids: Row ids that will be looked up, any shape. When more than a million wait already, they are dropped and
                counted (`hot_rows`).

        Raises:
            UnknownTableError: The replica has no such table.
            RowRangeError: An id is no row of the table.
        """
        wanted = _as_ids(ids).reshape(-1)

        def announce(generation: Generation) -> None:
            table = self._disk_table(generation, fqn, wanted)
            if table is not None:
                table.prefetch(wanted)

        self._with_generation(announce)

    @contextlib.contextmanager
    def pinned(self, fqn: str, ids: npt.ArrayLike | torch.Tensor) -> Iterator[int]:
        """Keep rows of a table on disk in memory meanwhile, and yield how many of the ids that holds for.

            with replica.pinned("user.weight", ids):
                ...  # lookups of these rows do not wait for the disk

        It holds for the copy that answers now: when another one takes its place, its rows are read as usual.

        Args:
            fqn: Table. Of one in memory all rows are.
            ids: Row ids, any shape; `hot_rows` says how many there is place for, and a fourth of them can be pinned.

        Raises:
            HeadraceError: As of `lookup`.
        """
        wanted = np.unique(_as_ids(ids))
        with contextlib.ExitStack() as stack:

            def pin(generation: Generation) -> int:
                table = self._disk_table(generation, fqn, wanted)
                return wanted.size if table is None else stack.enter_context(table.pinned(wanted))

            yield self._with_generation(pin)

    def hot_rows(self) -> dict[str, HotRowStats]:
        """Return what has become of lookups of each table on disk, by fqn, since the copy that answers was begun."""
        tables = self._generation.tables
        return {fqn: table.stats for fqn, table in tables.items() if isinstance(table, DiskTable)}

    def _disk_table(self, generation: Generation, fqn: str, ids: _Ids) -> DiskTable | None:
        table = self._table(generation, fqn)
        table.spec.check_row_ids(ids)
        return table if isinstance(table, DiskTable) else None

    @property
    def server_id(self) -> str:
        """Identity of the store that it is a copy of."""
        return self._generation.server_id

    @property
    def tables(self) -> dict[str, TableSpec]:
        """Tables that it has, by fqn."""
        return {fqn: table.spec for fqn, table in self._generation.tables.items()}

    def num_rows(self, fqn: str) -> int:
        """Return how many rows of a table are present; of one on disk, about (`DiskTable.num_present`).

        Raises:
            UnknownTableError: The replica has no such table.
        """
        return self._with_generation(lambda generation: self._table(generation, fqn).num_present)

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

    # Proving.

    def audit(self, *, tables: Sequence[str] | None = None, timeout_s: float = 600.0) -> ReplicaAuditReport:
        """Compare the weights that lookups see with the server's, row for row, by their digests.

        The replica does not move on while a range of rows is looked at, about a second; lookups go on.

        Args:
            tables: Which to compare; None for all that can be, the others being named in the report.
            timeout_s: Deadline, seconds. A shard looks at some hundred thousand rows a second. In `step` a range is
                looked at again when rows came meanwhile.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: A table that was asked for has virtual ids, or is kept in another precision.
            UnavailableError: It did not end in time, or the replica is not kept up to date.
        """
        return self._run(self._audit(tables), timeout_s, "the audit has not ended")

    def digest(self, fqn: str) -> TableDigest:
        """Return digests of the weights of a table's rows, by bucket, all as of one moment.

        They are those of `EmbeddingReader.digest(…, only_weights=True)` for the same rows.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: The table has virtual ids, or is kept in another precision.
        """
        return self._run(self._digest(fqn), _DIGEST_TIMEOUT_S, "the digest has not ended")

    async def _digest(self, fqn: str) -> TableDigest:
        copy = self._copies[-1]
        table = self._table(copy.generation, fqn)
        self._check_can_audit(table.spec)
        async with copy.held():
            return await asyncio.to_thread(digest_table, table)

    def _check_can_audit(self, spec: TableSpec) -> None:
        if (why := why_left_out(spec, self._config)) is not None:
            raise RequestError(f"table {spec.fqn!r} cannot be compared: {why}")

    async def _audit(self, fqns: Sequence[str] | None) -> ReplicaAuditReport:
        copy = self._copies[-1]
        left_out: dict[str, str] = {}
        if fqns is None:
            specs = {fqn: table.spec for fqn, table in sorted(copy.generation.tables.items())}
            reasons = {fqn: why_left_out(spec, self._config) for fqn, spec in specs.items()}
            left_out = {fqn: why for fqn, why in reasons.items() if why is not None}
            fqns = [fqn for fqn in specs if fqn not in left_out]
        for fqn in fqns:
            self._check_can_audit(self._table(copy.generation, fqn).spec)
        return ReplicaAuditReport(tables=tuple([await audit_table(copy, fqn) for fqn in fqns]), left_out=left_out)

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
        self._builder.close()
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

    def _count_missing(self, fqn: str, ids: _Ids, missing: npt.NDArray[np.bool_], *, what: str = "row") -> None:
        number = int(np.count_nonzero(missing))
        if number:
            self.num_missing[fqn] = self.num_missing.get(fqn, 0) + number
            if self._config.missing == "error":
                first = int(ids[np.argmax(missing)])
                raise RequestError(f"table {fqn!r}: {what} {first} is not there ({number} of {ids.size} are missing)")

    def _run(self, work: Coroutine[Any, Any, _T], timeout_s: float, late: str | None = None) -> _T:
        async def bounded() -> _T:
            async with asyncio.timeout(timeout_s):
                return await work

        if self._is_closed:
            work.close()
            raise UnavailableError("the replica is closed")
        try:
            return asyncio.run_coroutine_threadsafe(bounded(), self._loop).result()
        except TimeoutError as exc:
            late = late or f"the replica has not caught up with {self._address}"
            raise UnavailableError(f"{late} in {timeout_s:g} s") from exc

    # What follows runs on the replica's own thread.

    async def _switch(self, build: Callable[[], Coroutine[Any, Any, Followed]], *, keep_previous: bool) -> None:
        async with self._switching:
            copy = await build()
            try:
                await copy.wait_until(lambda: _has_caught_up(copy, self._current))
            except BaseException:
                self._dropped.append(copy)
                await self._end_dropped()
                raise
            keep = self._copies[-1:] if keep_previous else []
            self._dropped += [old for old in self._copies if old not in keep]
            self._copies = [*keep, copy]
            self._current, self._failure = copy.generation, None
            self._notify()
            await self._end_dropped()

    async def _roll_back(self) -> None:
        async with self._switching:
            if len(self._copies) < 2:
                raise ConfigError("there is no previous copy to roll back to")
            self._dropped.append(self._copies.pop())
            self._current, self._failure = self._copies[-1].generation, self._copies[-1].lost
            self._notify()
            await self._end_dropped()

    async def _close(self) -> None:
        if self._rebuilding is not None:
            self._rebuilding.cancel()
            await asyncio.wait([self._rebuilding])
        self._dropped += self._copies
        await self._end_dropped()

    async def _end_dropped(self) -> None:
        """Stop following into copies that nobody needs, and free them; goes on where it was cancelled before."""
        while self._dropped:
            copy = self._dropped[0]
            await copy.close()
            await asyncio.to_thread(copy.generation.close)
            if copy in self._dropped:
                self._dropped.remove(copy)

    async def _build(self, snapshot: Path | None) -> Followed:
        return await self._builder.build(snapshot, held_bytes=sum(copy.generation.size_bytes for copy in self._copies))

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
