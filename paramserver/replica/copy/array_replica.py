"""A copy of the tables that follows the server while it answers lookups, as numpy arrays."""

from __future__ import annotations

import contextlib
import html
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, Unpack, cast

import numpy as np
import numpy.typing as npt

from headrace.paramserver.reading.dense_parts import DensePart
from headrace.paramserver.reading.link import Dial
from headrace.paramserver.replica.api.config import ReplicaConfig, ReplicaSettings
from headrace.paramserver.replica.copy.audit import ReplicaAuditReport, audit_copy, digest_copy
from headrace.paramserver.replica.copy.builder import CopyBuilder
from headrace.paramserver.replica.copy.copies import Copies
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.copy.shard_tail import Freshness
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.base import Bools, Ids, ReplicaTable
from headrace.paramserver.replica.tables.hot_rows import HotRowStats
from headrace.paramserver.replica.tables.on_disk import DiskTable
from headrace.paramserver.rpc.address import server_address
from headrace.paramserver.rpc.outages import OutageLog
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.snapshots.bucket import is_object_store_url
from headrace.paramserver.system.event_loop import LoopThread
from headrace.paramserver.system.settings import check_names
from headrace.paramserver.system.text import counted, first_of, format_seconds
from headrace.schemas.errors import ConfigError, HeadraceError, RequestError, StorageError, UnavailableError
from headrace.schemas.row_digest import TableDigest
from headrace.schemas.tables import StateSpec, TableSpec, as_ids
from headrace.schemas.version import Version

__all__ = ["ArrayReplica"]

_T = TypeVar("_T")

_CLOSE_TIMEOUT_S = 10.0
_DIGEST_TIMEOUT_S = 600.0


class ArrayReplica:
    """A copy of the tables that follows the server; lookups return numpy arrays, without torch.

    `EmbeddingReplica` returns tensors, and says what all methods promise.

    Attributes:
        num_missing: Number of ids that lookups did not find, by fqn.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        snapshot: str | Path | None = None,
        config: ReplicaConfig | None = None,
        open_timeout_s: float = 60.0,
        ssl_context: ssl.SSLContext | None = None,
        server_hostname: str | None = None,
        token: Token | None = None,
        reach_log: OutageLog | None = None,
        on_progress: Callable[[], None] = lambda: None,
        **settings: Unpack[ReplicaSettings],
    ) -> None:
        """Connect, load the tables, and return when the copy has caught up with the server.

        Args:
            address: `host:port` of any shard, or of several with commas. None takes the variable `HEADRACE_SERVER`.
            snapshot: Directory of a snapshot to start from. None reads the server's rows, or fetches its newest
                snapshot if there are tables of virtual ids.
            config: Settings; None takes them from `settings`.
            open_timeout_s: Give up after this long without progress, seconds. Progress is a part of the copy, or of the
                log that it lacks; waiting for the end of a step is none. The total time has no limit.
            ssl_context: For TLS, from `client_tls_context`.
            server_hostname: Name in every shard's certificate; None expects each shard's own host.
            token: For a server that requires one.
            reach_log: Logs which shards cannot be reached; None creates one. Replicas of one server may share it.
            on_progress: Called, by any thread, whenever a copy makes progress as defined above.
            **settings: Fields of `ReplicaConfig`, instead of `config`.

        Raises:
            ConfigError: A setting, the address or the snapshot is wrong, or memory is short.
            UnauthorizedError: The server requires other credentials.
            UnavailableError: The server is away, or its run did not end a step in time.
            GoneError: The server no longer has the log after the snapshot.
            CorruptionError: The snapshot is damaged.
        """
        if config is not None and settings:
            raise ConfigError("give settings in `config` or as arguments, not both")
        self.num_missing: dict[str, int] = {}
        check_names(ReplicaConfig, settings)
        self._config = config or ReplicaConfig(**cast(dict[str, Any], settings))
        address = server_address(address)
        dial = Dial(
            ssl_context=ssl_context,
            server_hostname=server_hostname,
            token=token,
            timeout_s=self._config.timeout_s,
            reads_copies=True,
            reach_log=reach_log or OutageLog(),
        )
        self._reach_log = dial.reach_log
        self._counting = threading.Lock()
        self._holding = threading.Lock()
        self._held: Version | None = None  # the last one that `next_recorded_step` has returned
        self._max_stay_s, self._letting_go = 0.0, threading.Timer(0.0, lambda: None)
        self._builder = CopyBuilder(address, dial, self._config)
        self._copies = Copies(self._builder, on_progress)
        self._thread = LoopThread("headrace-replica", owner="the replica")
        try:
            self._switch(snapshot, timeout_s=open_timeout_s)
        except BaseException:
            self.close()
            raise

    # Lookups.

    def find_rows(self, fqn: str | TableSpec, identities: npt.ArrayLike) -> Ids:
        """Return the row that each raw id is mapped to, int64 of the same shape; -1 where no row has the identity.

        The table is a name or a spec, as for `look`.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: The table has no identities.
        """
        wanted = as_ids(identities)
        found = self._with_table_set(lambda table_set: table_set.find_rows(fqn, wanted.reshape(-1)))
        return found.reshape(wanted.shape)

    def look_up_meta(self, fqn: str, ids: Ids) -> tuple[StateSpec, npt.NDArray[np.void]]:
        """Return a table's state of runtime meta, and opaque[n], that of int64[n] rows; zeros for -1.

        Errors are those of `EmbeddingReplica.lookup_runtime_meta`.
        """
        return self._with_table_set(lambda table_set: table_set.look_up_meta(fqn, ids))

    def look(
        self, wanted: Sequence[tuple[str | TableSpec, Ids, Callable[[ReplicaTable, Ids], tuple[_T, Bools]]]]
    ) -> list[_T]:
        """Return the results of functions of tables' rows, all from one moment.

        Each entry of `wanted` is (table, int64[n] row ids, a function of table and ids such as `ReplicaTable.gather`),
        which returns a result and bool[n], which of the ids are missing. A table is a name, or a spec: then it must
        still have the spec's dim and type. A function may be called twice; its result must not share memory with the
        table. Errors are those of `EmbeddingReplica.lookup`, and `ConfigError` for a table that is another one now.
        """

        def look(table_set: TableSet) -> tuple[list[str], list[tuple[_T, Bools]]]:
            def make_all() -> tuple[list[str], list[tuple[_T, Bools]]]:
                # Within the moment: a table may be dropped and made anew.
                tables = [table_set.table(fqn) for fqn, _, _ in wanted]
                for table, (_, ids, _) in zip(tables, wanted, strict=True):
                    table.spec.check_row_ids(ids)
                found = [make(table, ids) for table, (_, ids, make) in zip(tables, wanted, strict=True)]
                return [table.spec.fqn for table in tables], found

            return table_set.seqlock.read(make_all)

        names, found = self._with_table_set(look)
        for name, (_, ids, _), (_, missing) in zip(names, wanted, found, strict=True):
            self._count_missing(name, ids, missing)
        return [rows for rows, _ in found]

    def dense_part(self, model: str | None = None) -> DensePart:
        """Return what `dense` copies from: the arrays must not be changed. Errors are those of `dense`."""
        return self._with_table_set(lambda table_set: table_set.dense.part(model))

    @property
    def dense_tensors(self) -> dict[str, TableSpec]:
        """Specs of the dense tensors that belong to the newest parts, by name."""
        dense = self._table_set.dense
        return {name: spec for model in dense.models for name, spec in dense.specs_of(model).items()}

    def dense_spec(self, name: str) -> TableSpec | None:
        """Return the spec of the dense tensor that a name means, or a path that no table has; None if there is none."""
        return self._with_table_set(lambda table_set: table_set.dense_spec(name))

    def at_one_moment(self, compute: Callable[[], _T]) -> _T:
        """Return what a function computes, with all its lookups in this replica, on any thread, of one moment.

            scores = replica.at_one_moment(lambda: served(batch))

        With `consistency="step"` the moment is at a step, which is `step` within the function. If an update becomes
        visible meanwhile, the function is called again, and updates wait until it returns: it must change nothing, and
        its missing ids are counted each time. It may not wait for an update (`wait_for`).

        Raises:
            HeadraceError: As for `lookup`.
        """
        return self._with_table_set(lambda table_set: table_set.seqlock.read(compute))

    def _with_table_set(self, look: Callable[[TableSet], _T]) -> _T:
        while True:
            table_set = self._table_set
            try:
                found = look(table_set)
            except (UnavailableError, StorageError):
                # A copy on disk that was replaced meanwhile is closed.
                if table_set is self._copies.current and table_set.failure is None:
                    raise
            else:
                # A copy that was replaced meanwhile may be ahead of the new one: the next lookup would go back in time.
                if table_set.failure is None and table_set is self._copies.current:
                    return found
            if table_set is self._copies.current:
                raise StorageError(f"the replica's copy is not whole any more: {table_set.failure}")

    def prefetch(self, fqn: str, ids: npt.ArrayLike) -> None:
        """Read rows of a table on disk into its hot rows, in the background; do nothing for a table in memory.

        If more than a million ids wait already, these are dropped and counted (`hot_rows`).

        Raises:
            UnknownTableError: The replica has no such table.
            RowRangeError: An id is not a row of the table.
        """
        wanted = as_ids(ids).reshape(-1)

        def prefetch(table_set: TableSet) -> None:
            if (table := _disk_table(table_set, fqn, wanted)) is not None:
                table.prefetch(wanted)

        self._with_table_set(prefetch)

    @contextlib.contextmanager
    def pinned(self, fqn: str, ids: npt.ArrayLike) -> Iterator[int]:
        """Keep rows of a table on disk in memory for the block, and yield how many of the ids are kept.

            with replica.pinned("user.weight", ids):
                ...  # lookups of these rows do not wait for the disk

        The pin is for the copy that answers now; rows of a later copy are read as usual. At most a fourth of the hot
        rows can be pinned. A table in memory keeps all rows anyway. Errors are those of `lookup`.
        """
        wanted = np.unique(as_ids(ids))
        with contextlib.ExitStack() as stack:

            def pin(table_set: TableSet) -> int:
                table = _disk_table(table_set, fqn, wanted)
                return wanted.size if table is None else stack.enter_context(table.pinned(wanted))

            yield self._with_table_set(pin)

    def hot_rows(self) -> dict[str, HotRowStats]:
        """Return counts of lookups in each table on disk, by fqn, since the present copy was built."""
        tables = self._table_set.tables
        return {fqn: table.stats for fqn, table in tables.items() if isinstance(table, DiskTable)}

    @property
    def server_id(self) -> str:
        """Identity of the store that is copied."""
        return self._table_set.server_id

    @property
    def tables(self) -> dict[str, TableSpec]:
        """Specs of the replica's tables, by fqn."""
        return {fqn: table.spec for fqn, table in self._table_set.tables.items()}

    def spec_of(self, fqn: str | TableSpec) -> TableSpec:
        """Return the spec of a table by its name, or by its path if only one model has it.

        A spec stands for the table that `look` reads for it.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: Several models have the path.
        """
        return self._table_set.table(fqn).spec

    def num_rows(self, fqn: str) -> int:
        """Return how many rows of a table are present; approximate for a table on disk.

        The result is 0 while a failed copy is rebuilt, when all lookups fail. Raises `UnknownTableError`.
        """
        try:
            return self._with_table_set(lambda table_set: table_set.any_table(fqn).num_present)
        except StorageError:  # the copy has failed, perhaps during the call; `failure` reports it now or in a moment
            return 0

    # Freshness.

    @property
    def epoch(self) -> int:
        """Epoch of the run that `step` belongs to; 0 before the first."""
        return (self._table_set.visible or (0, -1))[0]

    @property
    def step(self) -> int:
        """The watermark: every update up to this step is visible, in all shards and tables; -1 before the first."""
        return (self._table_set.visible or (0, -1))[1]

    @property
    def failure(self) -> HeadraceError | None:
        """Why the replica is not kept up to date now; None while it is."""
        failure = self._copies.failure
        trouble = self._reach_log.trouble(self._copies.addresses) or self._copies.silence
        return UnavailableError(trouble) if failure is None and trouble is not None else failure

    @property
    def incomplete(self) -> tuple[str, ...]:
        """Tables of which the trainer has not sent all rows to the server yet.

        With `consistency="latest"`, lookups see those that are there and count others in `num_missing`; with `step`,
        a table that was never whole is shown once it is.
        """
        return tuple(self._table_set.incomplete)

    @property
    def hidden(self) -> tuple[str, ...]:
        """Those tables that lookups do not see yet."""
        return tuple(self._table_set.hidden)

    @property
    def is_beginning_anew(self) -> bool:
        """Whether the present copy has lost its place and a new one is built; any other failure may pass by itself."""
        return self._copies.failure is not None

    def freshness(self) -> list[Freshness]:
        """Return how far behind each shard's part is."""
        return self._table_set.freshness()

    def wait_for(self, step: int, timeout_s: float, *, epoch: int | None = None) -> None:
        """Return when every update up to a step of the newest run is visible.

        Args:
            step: The step.
            timeout_s: Deadline, seconds.
            epoch: Wait for this run's step, or a newer run's; None for whatever run is the newest.

        Raises:
            UnavailableError: The deadline passed; the message says which step is visible, and why.
        """

        def is_visible() -> bool:
            visible = self._table_set.visible or (0, -1)
            return visible >= (visible[0] if epoch is None else epoch, step)

        copies = self._copies
        with copies.changed:
            if not copies.changed.wait_for(is_visible, timeout_s):
                failure = self.failure
                why = f"; {failure}" if failure is not None else ""
                raise UnavailableError(
                    f"step {step} is not visible within {format_seconds(timeout_s)}, step {self.step} is{why}"
                )

    # Recorded steps.

    def check_by_step(self) -> None:
        """Raise ConfigError if lookups do not see whole steps only, which recordings are of."""
        if self._config.consistency != "step":
            raise ConfigError('recordings are of exact steps: open the replica with consistency="step"')

    @contextlib.contextmanager
    def staying_at_recorded_steps(self, max_stay_s: float = 10.0) -> Iterator[None]:
        """Let lookups stay at each step of which the trainer has a recording, in the block; see `RecordingCheck`.

        Within the block call `next_recorded_step` to go on; after `max_stay_s` they do so by themselves. Updates wait
        meanwhile, and are fetched only as far as `max_pending_bytes` allows. Another thread's block waits for this one.

        Raises:
            ConfigError: The replica is not by step.
            UnavailableError: The replica is closed.
        """
        self.check_by_step()
        with self._holding:
            self._held, self._max_stay_s = None, max_stay_s
            self._hold_recorded(True)
            try:
                yield
            finally:
                self._letting_go.cancel()
                if self._copies.current is not None:  # it is not closed
                    self._hold_recorded(False)

    def next_recorded_step(self, timeout_s: float) -> Version | None:
        """Return (epoch, step) of the recorded step at which lookups stay; None if there is none within the timeout.

        Another call goes on to the next one. REQUIRES: within `staying_at_recorded_steps`.

        Raises:
            UnavailableError: The replica is closed.
        """
        self._letting_go.cancel()
        if self._held is not None:  # they may have gone on by themselves, to another one
            self._hold_recorded(True, goes_on=self._table_set.visible == self._held)
        copies = self._copies
        with copies.changed:
            copies.changed.wait_for(lambda: copies.current is None or copies.current.held is not None, timeout_s)
        if (held := self._table_set.held) is not None:
            self._held = held
            self._letting_go = threading.Timer(self._max_stay_s, self._hold_recorded, (False,))
            self._letting_go.daemon = True
            self._letting_go.start()
        return held

    def _hold_recorded(self, is_on: bool, *, goes_on: bool = False) -> None:
        hold = self._copies.hold_recorded(is_on, goes_on=goes_on)
        self._thread.run(hold, late="the replica does not leave its step", timeout_s=_CLOSE_TIMEOUT_S)

    # Audits.

    def audit(self, *, tables: Sequence[str] | None = None, timeout_s: float = 600.0) -> ReplicaAuditReport:
        """Compare the weights that lookups see with the server's, row for row, by their digests.

        The replica pauses while a range of rows is compared, for about a second; lookups go on. With
        `consistency="step"` a range is compared again if rows arrived meanwhile.

        Args:
            tables: Tables to compare; None for all that can be. The report names the others.
            timeout_s: Deadline, seconds. A shard digests a few hundred thousand rows a second.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: A given table has virtual ids, or is kept in another precision.
            UnavailableError: The deadline passed, or the replica is not kept up to date.
        """
        audit = self._on_newest(lambda copy: audit_copy(copy, self._config, tables))
        return self._thread.run(
            audit, late=f"the audit has not ended in {format_seconds(timeout_s)}", timeout_s=timeout_s
        )

    def digest(
        self, fqn: str, *, first_row: int = 0, end_row: int | None = None, with_presence: bool = False
    ) -> TableDigest:
        """Return digests of the weights of a table's rows from `first_row` to before `end_row`, all from one moment.

        They equal those of `EmbeddingReader.digest(…, only_weights=True)`. `with_presence` adds which rows are present.

        Raises:
            UnknownTableError: The replica has no such table.
            RequestError: The table has virtual ids, or is kept in another precision.
        """
        rows = {"first_row": first_row, "end_row": end_row, "with_presence": with_presence}
        digest = self._on_newest(lambda copy: digest_copy(copy, self._config, fqn, **rows))
        return self._thread.run(digest, late="the digest has not ended", timeout_s=_DIGEST_TIMEOUT_S)

    async def _on_newest(self, work: Callable[[LiveCopy], Coroutine[Any, Any, _T]]) -> _T:
        return await work(self._copies.newest)

    # Switching.

    def load_snapshot(self, folder: str | Path, *, timeout_s: float = 600.0) -> None:
        """Build a new copy from a snapshot, let it catch up, and switch to it; lookups use the old copy until then.

        Args:
            folder: Directory of the snapshot.
            timeout_s: Give up after this long without progress (`open_timeout_s`), seconds; the old copy stays.

        Raises:
            ConfigError: There is no snapshot, or not enough memory for both copies; checked before loading.
            CorruptionError: The snapshot is damaged.
            GoneError: The server no longer has the log after it, or is another store.
            UnavailableError: The new copy did not catch up in time.
        """
        self._switch(folder, timeout_s=timeout_s)

    def _switch(self, snapshot: str | Path | None, *, timeout_s: float) -> None:
        if snapshot is not None and is_object_store_url(str(snapshot)):
            raise ConfigError(f"replica: {snapshot} is an object store: start from its newest with object_store=…")
        folder = None if snapshot is None else Path(snapshot)
        switch = self._copies.switch(folder, timeout_s=timeout_s)

        def late() -> str:
            why = self._reach_log.trouble() or self._copies.describe_lag()
            return f"the replica has not caught up with {self._builder.address} in {format_seconds(timeout_s)}: {why}"

        self._thread.run(switch, late=late)

    def close(self) -> None:
        """Stop following and close the connections; running calls and later lookups fail. Idempotent.

        In a forked child it does nothing: the copies belong to the parent.
        """
        if self._thread.is_forked:
            return
        self._thread.close(self._copies.close, _CLOSE_TIMEOUT_S)
        self._copies.current = None
        self._builder.close()
        with self._copies.changed:
            self._copies.changed.notify_all()

    def __repr__(self) -> str:
        if self._copies.current is None:
            return f"<{type(self).__name__} of {self._builder.address}: closed>"
        behind_s = max((each.lag_s for each in self.freshness()), default=0.0)
        parts = [counted(len(self.tables), "table"), f"epoch {self.epoch}, step {self.step}"]
        parts.append("up to date" if behind_s == 0 else f"{format_seconds(behind_s)} behind")
        if incomplete := self.incomplete:
            parts.append(f"incomplete: {first_of(list(incomplete))}")
        if (failure := self.failure) is not None:
            parts.append(str(failure))
        return f"<{type(self).__name__} of {self._builder.address}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the line of `repr`, and the tables."""
        rows = "".join(
            f"<tr><td>{html.escape(fqn)}</td><td>{self.num_rows(fqn):,}</td><td>{spec.dim}</td>"
            f"<td>{spec.dtype.name.lower()}</td></tr>"
            for fqn, spec in ({} if self._copies.current is None else self.tables).items()
        )
        head = "<tr><th>table</th><th>rows</th><th>columns</th><th>type</th></tr>"
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table>{head}{rows}</table>"

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as Python 3.14 does with the dataset of a data loader's workers."""
        raise TypeError("a replica belongs to the process that made it: make one in each worker, at its first use")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _table_set(self) -> TableSet:
        table_set = self._copies.current
        if table_set is None or self._thread.is_forked:
            self._thread.check_usable()
            raise UnavailableError("the replica is closed")
        return table_set

    def _count_missing(self, fqn: str, ids: Ids, missing: Bools, *, what: str = "row") -> None:
        number = int(np.count_nonzero(missing))
        if number:
            with self._counting:
                self.num_missing[fqn] = self.num_missing.get(fqn, 0) + number
            if self._config.missing == "error":
                first = int(ids[np.argmax(missing)])
                raise RequestError(f"table {fqn!r}: {what} {first} is not there ({number} of {ids.size} are missing)")


def _disk_table(table_set: TableSet, fqn: str, ids: Ids) -> DiskTable | None:
    table = table_set.table(fqn)
    table.spec.check_row_ids(ids)
    return table if isinstance(table, DiskTable) else None
