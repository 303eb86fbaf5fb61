"""The public class of serving: a copy of the tables that follows the server and answers lookups while it does."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.reading.shard_link import Dial
from headrace.paramserver.replica.audit import ReplicaAuditReport, audit_copy, digest_copy
from headrace.paramserver.replica.config import ReplicaConfig
from headrace.paramserver.replica.copies import Copies
from headrace.paramserver.replica.copy_builder import CopyBuilder
from headrace.paramserver.replica.disk_table import DiskTable
from headrace.paramserver.replica.followed import Followed
from headrace.paramserver.replica.freshness import Freshness
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.hot_rows import HotRowStats
from headrace.paramserver.replica.identity_lookup import look_by_identity
from headrace.paramserver.replica.loop_thread import LoopThread
from headrace.paramserver.replica.table import ReplicaTable, as_ids, default_row
from headrace.paramserver.rpc.reach_log import ReachLog
from headrace.paramserver.rpc.security import Token
from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import ConfigError, HeadraceError, RequestError, StorageError, UnavailableError
from headrace.schemas.table_digest import TableDigest
from headrace.schemas.tables import TableSpec

__all__ = ["EmbeddingReplica", "Looked"]

_T = TypeVar("_T")
_Ids = npt.NDArray[np.int64]

Looked = tuple[torch.Tensor, npt.NDArray[np.bool_]]
"""What a look at a table gives: `[rows or bags, dim]`, and bool[n], which of the ids are missing."""

_CLOSE_TIMEOUT_S = 10.0
_DIGEST_TIMEOUT_S = 600.0


class EmbeddingReplica:
    """Embedding tables in this process's memory, as the trainer has them, milliseconds later.

        with EmbeddingReplica("127.0.0.1:7601", consistency="step") as replica:
            rows = replica.lookup("user.weight", [3, 5, 8])

    It begins from a snapshot or by reading the running server, then follows each shard's update log on a thread of its
    own. A server that restarts is found again. When the log that it needs is gone, or the store is another one, it
    begins anew aside, and changes over when the new copy has caught up; lookups go on in the old one.

    Thread: any, for every method. In a forked child all of them raise, and `close` does nothing; to one that is spawned
    a replica cannot be given: each process makes its own.

    Attributes:
        num_missing: Ids that lookups have not found, by fqn.
    """

    def __init__(
        self,
        address: str,
        *,
        snapshot: str | Path | None = None,
        config: ReplicaConfig | None = None,
        open_timeout_s: float = 60.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
        reach_log: ReachLog | None = None,
        on_progress: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        """Connect, load, and return when the copy has caught up with the server.

        Args:
            address: `host:port` of any shard.
            snapshot: Directory of a snapshot to begin from; None reads what the server has, or its newest snapshot
                when there are tables of virtual ids.
            config: Settings; None takes them from `settings`.
            open_timeout_s: Give up when the copy has not got on for so long, seconds: nothing of it, nor of the log
                that it lacks, has come, or it waits for a step's end. There is no bound for all of it.
            ssl_context: For TLS, as `client_tls_context` makes it.
            server_hostname: Name that every shard's certificate has; each shard's own host when None.
            token: For a server that asks for one.
            reach_log: Says which shards cannot be reached; None makes one. Replicas of one server may share it.
            on_progress: Called, by any thread, whenever a copy has got on in that sense.
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
        dial = Dial(
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            token=token,
            timeout_s=self._config.timeout_s,
            reach_log=reach_log or ReachLog(),
        )
        self._reach_log = dial.reach_log
        self._counting = threading.Lock()
        self._builder = CopyBuilder(address, dial, self._config)
        self._copies = Copies(self._builder, on_progress)
        self._thread = LoopThread("headrace-replica", owner="the replica")
        try:
            self._switch(snapshot, keep_previous=False, timeout_s=open_timeout_s)
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
        wanted = {fqn: as_ids(ids) for fqn, ids in ids_of.items()}

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
        wanted = as_ids(identities)

        def look(generation: Generation) -> Looked:
            spec = generation.table(fqn).spec
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
        wanted = as_ids(identities)

        def find(generation: Generation) -> _Ids:
            generation.table(fqn)
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
        found = self._with_generation(lambda generation: _look(generation, wanted))
        for (fqn, ids, _), (_, missing) in zip(wanted, found, strict=True):
            self._count_missing(fqn, ids, missing)
        return [rows for rows, _ in found]

    def _with_generation(self, look: Callable[[Generation], _T]) -> _T:
        while True:
            generation = self._generation
            try:
                found = look(generation)
            except (UnavailableError, StorageError):
                # A copy on disk that was changed for another meanwhile is closed.
                if generation is self._copies.current and generation.failure is None:
                    raise
            else:
                # One that others do not look into any more may be ahead of theirs: who looks next would go back.
                if generation.failure is None and generation is self._copies.current:
                    return found
            if generation is self._copies.current:
                raise StorageError(f"the replica's copy is not whole any more: {generation.failure}")

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
        wanted = as_ids(ids).reshape(-1)

        def announce(generation: Generation) -> None:
            if (table := self._disk_table(generation, fqn, wanted)) is not None:
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
        wanted = np.unique(as_ids(ids))
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
        table = generation.table(fqn)
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

        While a copy that failed is made anew, and none can be looked up, that is 0.

        Raises:
            UnknownTableError: The replica has no such table.
        """
        try:
            return self._with_generation(lambda generation: generation.table(fqn).num_present)
        except StorageError:  # it has failed, perhaps amid the call: `failure` says so, now or in a moment
            return 0

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
        failure = self._copies.failure
        trouble = self._reach_log.trouble(self._copies.addresses) or self._copies.silence
        return UnavailableError(trouble) if failure is None and trouble is not None else failure

    @property
    def is_beginning_anew(self) -> bool:
        """Whether the copy that answers has lost its place and another is made; else a failure may pass by itself."""
        return self._copies.failure is not None

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

        copies = self._copies
        with copies.changed:
            if not copies.changed.wait_for(is_visible, timeout_s):
                failure = self.failure
                why = f"; {failure}" if failure is not None else ""
                raise UnavailableError(
                    f"step {step} is not visible within {format_seconds(timeout_s)}, step {self.step} is{why}"
                )

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
        audit = self._on_newest(lambda copy: audit_copy(copy, self._config, tables))
        return self._thread.run(
            audit, late=f"the audit has not ended in {format_seconds(timeout_s)}", timeout_s=timeout_s
        )

    def digest(
        self, fqn: str, *, first_row: int = 0, end_row: int | None = None, with_presence: bool = False
    ) -> TableDigest:
        """Return digests of the weights of a table's rows, by bucket, all as of one moment.

        They are those of `EmbeddingReader.digest(…, only_weights=True)` for the same rows.

        Args:
            fqn: Table.
            first_row: First row looked at.
            end_row: End of them, exclusive; None for the table's end.
            with_presence: Say which rows are there.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: The table has virtual ids, or is kept in another precision.
        """
        rows = {"first_row": first_row, "end_row": end_row, "with_presence": with_presence}
        digest = self._on_newest(lambda copy: digest_copy(copy, self._config, fqn, **rows))
        return self._thread.run(digest, late="the digest has not ended", timeout_s=_DIGEST_TIMEOUT_S)

    async def _on_newest(self, work: Callable[[Followed], Coroutine[Any, Any, _T]]) -> _T:
        return await work(self._copies.newest)

    # Switching.

    def load_snapshot(self, folder: str | Path, *, keep_previous: bool = True, timeout_s: float = 600.0) -> None:
        """Begin anew from a snapshot, aside, catch up, and change over; lookups go on in the old copy until then.

        Args:
            folder: Directory of the snapshot.
            keep_previous: Keep the old copy up to date too, for `roll_back`; costs its memory.
            timeout_s: Give up when the new copy has not got on for so long, seconds (`open_timeout_s`); the old stays.

        Raises:
            ConfigError: There is no snapshot, or not enough memory for both copies; said before anything is loaded.
            CorruptionError: It is damaged.
            GoneError: The server has no log from there on, or is another one.
            UnavailableError: The new copy did not catch up in time.
        """
        self._switch(folder, keep_previous=keep_previous, timeout_s=timeout_s)

    def _switch(self, snapshot: str | Path | None, *, keep_previous: bool, timeout_s: float) -> None:
        folder = None if snapshot is None else Path(snapshot)
        switch = self._copies.switch(folder, keep_previous=keep_previous, timeout_s=timeout_s)

        def late() -> str:
            why = self._reach_log.trouble() or self._copies.describe_lag()
            return f"the replica has not caught up with {self._address} in {format_seconds(timeout_s)}: {why}"

        self._thread.run(switch, late=late)

    def roll_back(self) -> None:
        """Change back to the copy before the last `load_snapshot`, and drop the present one.

        Raises:
            ConfigError: It was not kept.
        """
        self._thread.run(self._copies.roll_back(), late="the replica has not rolled back", timeout_s=_CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Stop following and free the connections; lookups, and calls that have not ended, fail. Idempotent.

        In a forked child it does nothing: the copies are the parent's.
        """
        if self._thread.is_forked:
            return
        self._thread.close(self._copies.close, _CLOSE_TIMEOUT_S)
        self._copies.current = None
        self._builder.close()
        with self._copies.changed:
            self._copies.changed.notify_all()

    def __reduce__(self) -> NoReturn:
        """Say why there is no pickle: a data loader's workers are given their dataset as one since Python 3.14."""
        raise TypeError("a replica belongs to the process that made it: make one in each worker, at its first use")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _generation(self) -> Generation:
        generation = self._copies.current
        if generation is None or self._thread.is_forked:
            self._thread.check_usable()
            raise UnavailableError("the replica is closed")
        return generation

    def _count_missing(self, fqn: str, ids: _Ids, missing: npt.NDArray[np.bool_], *, what: str = "row") -> None:
        number = int(np.count_nonzero(missing))
        if number:
            with self._counting:
                self.num_missing[fqn] = self.num_missing.get(fqn, 0) + number
            if self._config.missing == "error":
                first = int(ids[np.argmax(missing)])
                raise RequestError(f"table {fqn!r}: {what} {first} is not there ({number} of {ids.size} are missing)")


def _look(
    generation: Generation, wanted: Sequence[tuple[str, _Ids, Callable[[ReplicaTable, _Ids], Looked]]]
) -> list[Looked]:
    for fqn, ids, _ in wanted:
        generation.table(fqn).spec.check_row_ids(ids)
    return generation.gate.read(lambda: [make(generation.tables[fqn], ids) for fqn, ids, make in wanted])
