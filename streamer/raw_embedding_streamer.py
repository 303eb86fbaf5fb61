"""The public class: streams the embedding rows of a model, as training changes them, to a parameter server."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.paramserver.address import format_address, parse_address
from headrace.paramserver.client import ParamServerClient
from headrace.paramserver.config import DEFAULT_PORT
from headrace.paramserver.reader import EmbeddingReader
from headrace.paramserver.security import client_tls_context, load_token
from headrace.schemas.errors import ConfigError, HeadraceError, StorageError, UnavailableError
from headrace.streamer.audit import AuditReport, TableAudit, audit_tables, mark_what_differs
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flusher import Flusher
from headrace.streamer.live_rows import LiveRows, fetch_rows
from headrace.streamer.rendezvous import Connect, Store, Writer
from headrace.streamer.run_state import RunState
from headrace.streamer.sender import Sender
from headrace.streamer.staging import StagingPool
from headrace.streamer.stats import StreamerStats
from headrace.streamer.tap import Tap, tap_model
from headrace.streamer.tapped_table import TappedTable
from headrace.streamer.world import World, current_world

__all__ = ["RawEmbeddingStreamer"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_RUN_BYTES = 512
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What rank 0 tells the others."""

    epoch: int
    server_ids: tuple[str, ...]
    error: str | None = None


class RawEmbeddingStreamer:
    """Streams every embedding row, with its optimizer state, that training changes.

        streamer = RawEmbeddingStreamer("127.0.0.1:7601", run="ctr-v7")
        streamer.attach(model, optimizer)
        ...  # train as before
        streamer.flush()
        streamer.close()

    A step marks rows; at its end their present values go to the server from a background thread. The server may be
    slow or away: training goes on, rows stay marked, and all arrives later. When streaming cannot go on at all (another
    trainer has taken over the run, another store, a refused batch), the next step, `flush` or `close` raises why, or
    says so in the log once, as `StreamerConfig.on_error` is set.

    When a program ends without `close`, what is not acked by then is not delivered.

    Thread: the training thread's, but `stats`, which any thread may call. In a forked child (a data loader's worker)
    there is no streamer: steps do nothing, and the methods raise.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str,
        config: StreamerConfig | None = None,
        world: World | None = None,
        **settings: Any,
    ) -> None:
        """Connect to every shard and take the run over: an older trainer of the same run is fenced off.

        With `torch.distributed` initialized, all ranks must make their streamer together.

        Args:
            address: `host:port` of any shard; port 7601 when it has none.
            run: Name that groups the trainer's ranks and its restarts.
            config: Settings; None takes them from `settings`, the environment (`HEADRACE_STREAMER_…`) and the defaults.
            world: The ranks of the run; None for those of `torch.distributed`.
            **settings: Fields of `StreamerConfig`, without `config`.

        Raises:
            ConfigError: The address, the run's name or a setting is wrong.
            UnavailableError: No server there within `connect_timeout_s`.
            UnauthorizedError: The server asks for other credentials.
        """
        host, port = parse_address(address, default_port=DEFAULT_PORT)
        if not 1 <= len(run.encode()) <= _MAX_RUN_BYTES or not run.isprintable():
            raise ConfigError(f"run {run!r} is empty, over {_MAX_RUN_BYTES} bytes or has control characters")
        if config is not None and settings:
            raise ConfigError(f"settings stand in `config` or as arguments, not both: {', '.join(sorted(settings))}")
        self._config = config if config is not None else StreamerConfig.load(**settings)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._taps: list[Tap] = []
        self._tables: list[TappedTable] = []
        self._step = 0
        self._given_step: int | None = None
        self._generation = 0
        self._failure: HeadraceError | None = None
        self._pre_eviction_hooks: OrderedDict[int, Callable[[str, torch.Tensor], None]] = OrderedDict()
        self._is_closed = False
        self._is_paused = False
        self._pool = StagingPool(self._config.staging_bytes)
        self._sender = Sender(config=self._config, pool=self._pool, connect=_connector(self._config))
        self._sender.start()
        try:
            self._address, self._world = address, world or current_world()
            self._store, self._writer = self._take_over(host, port, run, self._world)
        except BaseException:
            self._sender.stop(_STOP_TIMEOUT_S)
            raise
        self._flusher = Flusher(
            config=self._config,
            num_shards=len(self._store.shards),
            pool=self._pool,
            submit=self._sender.submit,
            describe_delay=self._sender.describe_delay,
        )
        # Runs when nobody refers to the streamer any more (its hooks do, as long as the model lives), or at exit.
        self._finalizer = weakref.finalize(self, _abandon, self._sender, self._pid)

    @property
    def epoch(self) -> int:
        """The run's epoch, which every row carries."""
        return self._writer.epoch

    @property
    def num_shards(self) -> int:
        """Shards of the store."""
        return len(self._store.shards)

    @property
    def tables(self) -> list[TappedTable]:
        """The tables that are streamed."""
        return list(self._tables)

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        publish: Literal["updated", "all"] = "updated",
        tables: Iterable[str] | None = None,
    ) -> None:
        """Stream the embedding tables of a model from now on; may be called for several models.

        Args:
            model: With `nn.Embedding` or `nn.EmbeddingBag`, FBGEMM's table-batched or TorchRec's sharded ones.
            optimizer: Those that train the tables; None when the tables have fused optimizers.
            publish: `updated` sends rows once they change; `all` sends every row first, so that the store has the
                whole tables.
            tables: Names of tables, or patterns such as `*.users.weight`, to stream only these; None for all.

        With `torch.distributed` initialized, all ranks must attach together; a refusal is one on every rank.

        Raises:
            ConfigError: A name or a pattern in `tables` is that of no table; the message lists the nearest.
            UnsupportedModelError: A table cannot be streamed exactly; nothing is attached.
            SpecMismatchError: The server has a table of that name with another shape; nothing is attached.
            UnavailableError: A shard cannot be reached; nothing is attached.
        """
        if publish not in ("updated", "all"):
            raise ConfigError(f"publish {publish!r} is neither 'updated' nor 'all'")
        with self._lock:
            self._check_usable()
            tap = tap_model(model, () if optimizer is None else optimizer, self._on_step, tables=tables)
            self._add_tap(tap)
            if publish == "all":
                for table in tap.tables:
                    table.dirty.mark_all()

    def step(self, step: int | None = None) -> None:
        """Declare that a training step is over.

        For a model without a torch optimizer, where a step's end is else seen when the next begins; and to give steps
        numbers of one's own. Call it where no update is under way.

        Args:
            step: The step's number; None takes the next. Numbers never fall, and count on from here.

        Raises:
            ConfigError: The number is below the last one.
            HeadraceError: Streaming has ended, as `on_error` is set.
        """
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            if step is not None and not self._step <= step < 2**63:
                raise ConfigError(f"step {step} after step {self._step}: steps only rise")
            self._given_step = step
            try:
                # Every tap is asked; one that had updates has called `_on_step`.
                has_ended = [tap.end_step() for tap in self._taps]
                if not any(has_ended):
                    self._end_step()
            finally:
                self._given_step = None

    def pause(self) -> None:
        """Send nothing at the ends of steps until `resume`; what changes meanwhile stays marked and goes out then.

        Steps go on to be counted. `flush` and `close` send everything all the same.
        """
        with self._lock:
            self._check_usable()
            self._is_paused = True

    def resume(self) -> None:
        """Send again, from the next end of a step on."""
        with self._lock:
            self._check_usable()
            self._is_paused = False

    @property
    def is_paused(self) -> bool:
        """Whether the ends of steps send nothing."""
        return self._is_paused

    def flush(self, timeout_s: float | None = None) -> None:
        """Send everything that has changed and return when all of it is durable on every shard.

        Args:
            timeout_s: How long to wait, seconds; None takes `flush_timeout_s`. Rows that are not sent by then stay
                marked, and go out later.

        Raises:
            UnavailableError: Not all is durable in time; the message says what is missing, and where.
            HeadraceError: Streaming has ended, whatever `on_error` says.
        """
        with self._lock:
            self._check_usable()
            timeout_s = self._config.flush_timeout_s if timeout_s is None else timeout_s
            deadline_s = time.monotonic() + timeout_s
            for tap in self._taps:
                tap.end_step()
            try:
                while True:
                    self._heed_new_store()
                    self._flusher.flush_all(self._step, deadline_s - time.monotonic())
                    self._sender.wait_durable(deadline_s - time.monotonic())
                    if self._generation == self._sender.generation:
                        return
            except UnavailableError as exc:
                self._raise_failure()
                raise UnavailableError(f"flush within {timeout_s:g} s: {exc}") from exc
            except HeadraceError:
                self._raise_failure()
                raise

    def audit(self, *, only_present: bool = True, timeout_s: float | None = None) -> AuditReport:
        """Flush, then compare every row with the store's by digests, and name the rows that differ.

        On several ranks all must call it: each compares its own rows, and every one gets the report of all.

        Args:
            only_present: Rows that the store does not have are no fault, as where rows are sent once they change.
            timeout_s: For the flush and then for the comparison, seconds; None takes `flush_timeout_s` for the flush,
                and no deadline for the comparison.

        Raises:
            UnavailableError: Not all is durable in time, or a shard does not answer.
            HeadraceError: Streaming has ended; on several ranks also when another rank could not do it.
        """
        with self._lock:
            mine: list[TableAudit] | HeadraceError
            try:
                self.flush(timeout_s)
                mine = self._ask_store(partial(audit_tables, self._tables, rank=self._world.rank), timeout_s)
            except HeadraceError as exc:
                if self._world.size == 1:
                    raise
                mine = exc
            parts = self._world.gather(mine)
            for rank, part in enumerate(parts):
                if isinstance(part, HeadraceError):
                    raise part if part is mine else HeadraceError(f"rank {rank} could not audit: {part}")
            tables = tuple(table for part in parts if isinstance(part, list) for table in part)
            return AuditReport(tables=tables, only_present=only_present, step=self._step)

    def fetch(self, fqn: str, row_ids: torch.Tensor) -> LiveRows:
        """Return copies of present weights and states of the trainer's rows, flushed or not.

        Call it where no update is under way.

        Args:
            fqn: Table.
            row_ids: Integers of any shape, global, on this rank; may repeat.

        Raises:
            UnknownTableError: No such table is streamed on this rank.
            RowRangeError: A row is not on this rank.
        """
        with self._lock:
            return fetch_rows(self._tables, fqn, row_ids)

    def register_pre_eviction_hook(self, hook: Callable[[str, torch.Tensor], None]) -> RemovableHandle:
        """Have a function called before rows are taken from their present use and given to another.

        It gets the table's fqn and the global row ids, int64[n] on the CPU, while `fetch` still returns their last
        values. What it raises ends the eviction. Hooks are called in the order in which they were registered.

        Returns:
            `remove()` ends it.
        """
        handle = RemovableHandle(self._pre_eviction_hooks)
        self._pre_eviction_hooks[handle.id] = hook
        return handle

    def notify_eviction(self, fqn: str, row_ids: torch.Tensor) -> None:
        """Say that rows are about to be evicted; for whoever evicts them. Nothing is sent: the new values will be.

        Args:
            fqn: Table.
            row_ids: Integers of any shape, global.
        """
        ids = row_ids.detach().reshape(-1).to(device="cpu", dtype=torch.int64)
        if ids.numel():
            for hook in list(self._pre_eviction_hooks.values()):
                hook(fqn, ids)

    def state_dict(self) -> dict[str, Any]:
        """Return what to put into the trainer's checkpoint, beside the model's and the optimizer's state: a few bytes.

        After a `flush` a resumed run has the least to send.
        """
        with self._lock:
            stats = self.stats()
            return RunState(
                run=self._writer.run,
                epoch=self.epoch,
                step=self._step,
                acked_step=stats.acked_step,
                is_drained=not stats.num_dirty_rows and not stats.num_inflight_flushes,
                server_ids=tuple(shard.server_id for shard in self._store.shards),
            ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, timeout_s: float | None = None) -> int:
        """Go on where a checkpoint was made: call it after the model's and the optimizer's state are loaded.

        Compares every row with the store's by digests and marks those that differ; see `run_state.py` for which rows
        else are sent. Steps count on from the checkpoint's. The epoch is this streamer's own, above the old one's.

        Args:
            state: What `state_dict` has returned.
            timeout_s: For the comparison, seconds; None has no deadline.

        Returns:
            Rows of this rank that are marked to be sent.

        Raises:
            ConfigError: It is the state of another run, or no model is attached.
            UnavailableError: A shard does not answer.
        """
        saved = RunState.from_dict(state)
        with self._lock:
            self._check_usable()
            if saved.run != self._writer.run:
                raise ConfigError(f"the checkpoint is of run {saved.run!r}, this streamer of run {self._writer.run!r}")
            if not self._taps:
                raise ConfigError("attach the model before load_state_dict: its rows are compared with the store's")
            self._step = max(self._step, saved.step)
            if saved.server_ids != tuple(shard.server_id for shard in self._store.shards):
                _log.warning("the checkpoint's store was another one: sending every row")
                self._flusher.mark_all()
                return self._flusher.num_dirty_rows
            mark = partial(mark_what_differs, self._tables, marks_absent=not saved.is_drained)
            return self._ask_store(mark, timeout_s)

    def _ask_store(self, ask: Callable[[EmbeddingReader], Awaitable[_T]], timeout_s: float | None) -> _T:
        """Return what a coroutine returns that is given a reader of all shards."""

        async def run() -> _T:
            async with (
                asyncio.timeout(timeout_s),
                await EmbeddingReader.connect(
                    self._address,
                    timeout_s=self._config.request_timeout_s,
                    ssl_context=_tls_context(self._config),
                    token=self._writer.token,
                ) as reader,
            ):
                return await ask(reader)

        # In a thread of its own: this one may have an event loop running, as in a notebook.
        with ThreadPoolExecutor(1, "headrace-ask") as pool:
            try:
                return pool.submit(asyncio.run, run()).result()
            except TimeoutError as exc:
                raise UnavailableError(f"the store has not been compared within {timeout_s:g} s") from exc

    def close(self, *, flush: bool = True, timeout_s: float | None = None) -> None:
        """Flush, remove every hook, close the connections and end the thread. Idempotent.

        Everything is closed also when this raises.

        Args:
            flush: Send what has changed and wait until it is durable; False leaves what is not acked behind.
            timeout_s: For the flush, seconds; None takes `flush_timeout_s`.

        Raises:
            UnavailableError: Not all is durable in time.
            HeadraceError: Streaming has ended, and no call has said so yet.
        """
        with self._lock:
            if self._is_closed:
                return
            try:
                # What has failed has been told already.
                if flush and self._failure is None and os.getpid() == self._pid:
                    self.flush(timeout_s)
            finally:
                self._is_closed = True
                for tap in self._taps:
                    tap.close()
                self._finalizer.detach()
                if os.getpid() == self._pid:
                    self._sender.stop(_STOP_TIMEOUT_S)

    def stats(self) -> StreamerStats:
        """Return what this streamer has done and what is on its way.

        Thread: any.
        """
        return self._sender.stats(step=self._step, num_dirty_rows=self._flusher.num_dirty_rows, failure=self._failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
            return
        try:
            # Training has failed, perhaps amid an update: what is not handed over yet is not worth trusting.
            self.close(flush=False)
        except HeadraceError as close_error:
            _log.warning("closing the streamer: %s", close_error)

    def attach_tap(self, make_tap: Callable[[Callable[[], None]], Tap]) -> None:
        """Stream the tables of a tap of one's own making, as `headrace.streamer.install` does.

        Args:
            make_tap: Gets what the tap has to call at each step boundary, on the training thread.

        Raises:
            SpecMismatchError: The server has a table of that name with another shape; nothing is attached.
            UnavailableError: A shard cannot be reached; nothing is attached.
        """
        with self._lock:
            self._check_usable()
            self._add_tap(make_tap(self._on_step))

    def _add_tap(self, tap: Tap) -> None:
        try:
            self._flusher.check_tables(tap.tables, max_frame_bytes=self._store.max_frame_bytes)
            self._sender.register(_specs_of(tap.tables))
        except BaseException:
            tap.close()
            raise
        self._flusher.add_tables(tap.tables)
        self._taps.append(tap)
        self._tables += tap.tables

    def _take_over(self, host: str, port: int, run: str, world: World) -> tuple[Store, Writer]:
        """Agree with the other ranks on an epoch above all that the store has seen, and open the session."""
        token = load_token(path=self._config.token_file, environ=os.environ)
        asks = Writer(run=run, client=f"rank{world.rank}", epoch=0, rank=world.rank, world_size=world.size, token=token)
        if world.rank == 0:
            return self._lead(host, port, asks, world)
        agreed: _Agreed = world.share(None)
        if agreed.error is not None:
            raise UnavailableError(f"rank 0 could not begin to stream: {agreed.error}")
        store, writer = self._sender.find_store(host, port, asks), asks.with_epoch(agreed.epoch)
        if tuple(shard.server_id for shard in store.shards) != agreed.server_ids:
            raise StorageError(f"rank {world.rank} finds another store at {format_address(host, port)} than rank 0")
        self._sender.open(store, writer)
        return store, writer

    def _lead(self, host: str, port: int, asks: Writer, world: World) -> tuple[Store, Writer]:
        """Choose the epoch, as rank 0, and tell the other ranks, also of a failure: they would wait for ever."""
        try:
            store = self._sender.find_store(host, port, asks)
            writer = self._sender.claim_epoch(store, asks)
            self._sender.open(store, writer)
        except BaseException as exc:
            world.share(_Agreed(0, (), str(exc) or type(exc).__name__))
            raise
        world.share(_Agreed(writer.epoch, tuple(shard.server_id for shard in store.shards)))
        return store, writer

    def _on_step(self) -> None:
        """Be told by a tap that a step is over."""
        if os.getpid() != self._pid:
            return  # a child that trains a copy of the model: it is not this run
        with self._lock:
            self._end_step()

    def _end_step(self) -> None:
        self._step = self._step + 1 if self._given_step is None else self._given_step
        if self._failure is not None and self._config.on_error == "log":
            return
        try:
            self._raise_failure()
            self._heed_new_store()
            if not self._is_paused:
                self._flusher.on_step(self._step)
        except HeadraceError as exc:
            self._fail(self._sender.error or exc)

    def _fail(self, exc: HeadraceError) -> None:
        """Act on an error as `on_error` says."""
        if self._config.on_error == "raise":
            raise exc
        self._failure = exc
        _log.error("streaming has stopped, training goes on: %s", exc)

    def _heed_new_store(self) -> None:
        generation = self._sender.generation
        if generation != self._generation:
            self._generation = generation
            self._flusher.mark_all(generation=generation)

    def _check_usable(self, *, passes_failure: bool = False) -> None:
        if self._is_closed:
            raise ConfigError("this streamer is closed")
        if os.getpid() != self._pid:
            raise ConfigError("a streamer belongs to the process that made it, and this is a forked child")
        if not passes_failure:
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what has ended streaming. An outage under `block`, or a NaN, has not: the next step tries again."""
        self._failure = self._failure or self._sender.error
        if self._failure is not None:
            raise self._failure.with_traceback(None)


def _connector(config: StreamerConfig) -> Connect:
    return partial(ParamServerClient.connect, timeout_s=config.connect_timeout_s, ssl_context=_tls_context(config))


def _tls_context(config: StreamerConfig) -> ssl.SSLContext | None:
    if not config.tls:
        return None
    return client_tls_context(authority=config.tls_authority, certificate=config.tls_certificate, key=config.tls_key)


def _specs_of(tables: list[TappedTable]) -> list[Any]:
    """Return each table's spec once: a rank may have several column shards of one table."""
    return list({table.spec.fqn: table.spec for table in tables}.values())


def _abandon(sender: Sender, pid: int) -> None:
    """End the thread of a streamer that was never closed; must not hold up the interpreter's exit."""
    if os.getpid() != pid:
        return
    stats = sender.stats()
    if stats.num_inflight_flushes:
        _log.warning(
            "a streamer was not closed: %d flushes (%.1f MiB) may not have been delivered",
            stats.num_inflight_flushes,
            stats.inflight_bytes / 2**20,
        )
    sender.stop(1.0)
