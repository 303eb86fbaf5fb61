"""The public class: streams the embedding rows of a model, as training changes them, to a parameter server."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, SupportsIndex

import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.paramserver.process.tracing import span
from headrace.schemas.errors import ConfigError, HeadraceError
from headrace.schemas.near_names import first_of
from headrace.streamer.audit import AuditReport
from headrace.streamer.call_arguments import check_run, host_and_port, step_number, timeout_seconds
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.delivery import Delivery
from headrace.streamer.eviction import Evictor, unused_rows
from headrace.streamer.live_rows import LiveRows, fetch_rows
from headrace.streamer.metrics import MetricsPort, serve_streamer
from headrace.streamer.rank_wait import told_when_late
from headrace.streamer.run_state import Resumption, RunState, digest_of, layout_of
from headrace.streamer.stats import StreamerStats
from headrace.streamer.store_inquiry import StoreInquiry
from headrace.streamer.taps.tap import Tap, tap_model
from headrace.streamer.taps.tapped_table import TappedTable
from headrace.streamer.world import World, current_world

__all__ = ["RawEmbeddingStreamer"]

_log = logging.getLogger(__name__)


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
    there is no streamer: steps do nothing, and the methods raise. To a child that is spawned it cannot be given.
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
        host, port = host_and_port(address)
        check_run(run)
        if config is not None and settings:
            raise ConfigError(f"settings stand in `config` or as arguments, not both: {', '.join(sorted(settings))}")
        self._config = config if config is not None else StreamerConfig.load(**settings)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._taps: list[Tap] = []
        self._tables: list[TappedTable] = []
        self._step = 0
        self._given_step: int | None = None
        self._evictor = Evictor()
        self._inherited: list[str] = []
        self._is_closed = False
        self._is_paused = False
        self._resumed: RunState | None = None
        self._world = world or current_world()
        with told_when_late("RawEmbeddingStreamer(...)", rank=self._world.rank, world_size=self._world.size):
            self._delivery = Delivery(host, port, run=run, world=self._world, config=self._config)
        self._inquiry = StoreInquiry(address, self._config, self._delivery.writer.token)
        self._metrics: MetricsPort | None = None
        if self._config.metrics_port is not None:
            try:
                self._metrics = serve_streamer(self, self._config, run=run, rank=self._world.rank)
            except ConfigError:
                self._delivery.stop(is_child=False)
                raise

    @property
    def epoch(self) -> int:
        """The run's epoch, which every row carries."""
        return self._delivery.writer.epoch

    @property
    def metrics_port(self) -> int | None:
        """Port on which Prometheus' page is served; None when it is not."""
        return None if self._metrics is None else self._metrics.port

    @property
    def num_shards(self) -> int:
        """Shards of the store."""
        return len(self._delivery.store.shards)

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
            UnsupportedModelError: A table cannot be streamed exactly, or is streamed already; nothing is attached.
            SpecMismatchError: The server has a table of that name with another shape; nothing is attached.
            UnavailableError: A shard cannot be reached; nothing is attached.
        """
        if publish not in ("updated", "all"):
            raise ConfigError(f"publish {publish!r} is neither 'updated' nor 'all'")
        with self._lock:
            self._check_usable()
            with told_when_late("attach(...)", rank=self._world.rank, world_size=self._world.size):
                tap = tap_model(model, () if optimizer is None else optimizer, self._on_step, tables=tables)
            self._add_tap(tap)
            if publish == "all":
                for table in tap.tables:
                    table.mark_all()
            else:
                known = self._delivery.store.table_names
                self._inherited += sorted({table.spec.fqn for table in tap.tables} & known)

    def step(self, step: SupportsIndex | None = None) -> None:
        """Declare that a training step is over.

        For a model without a torch optimizer, where a step's end is else seen when the next begins; and to give steps
        numbers of one's own. Call it where no update is under way.

        Args:
            step: The step's number; None takes the next. Numbers never fall, and count on from here.

        Raises:
            ConfigError: The number is none, or below the last one.
            HeadraceError: Streaming has ended, as `on_error` is set.
        """
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._given_step = None if step is None else step_number(step, after=self._step)
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
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._is_paused = True

    def resume(self) -> None:
        """Send again, from the next end of a step on."""
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
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
            ConfigError: A flush is under way on this thread, and a signal handler has called this amid it; or
                `timeout_s` is no number.
            HeadraceError: Streaming has ended, whatever `on_error` says.
        """
        with self._lock:
            self._check_usable()
            timeout_s = self._config.flush_timeout_s if timeout_s is None else timeout_seconds(timeout_s)
            for tap in self._taps:
                tap.end_step()
            with span("headrace.flush", run=self._delivery.writer.run, step=self._step):
                self._delivery.flush(self._step, timeout_s)

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
            parts = self._inquiry.audit(self._tables, self._world, lambda: self.flush(timeout_s), timeout_s)
            return AuditReport(tables=tuple(parts), only_present=only_present, step=self._step)

    def fetch(self, fqn: str, row_ids: npt.ArrayLike) -> LiveRows:
        """Return copies of present weights and states of the trainer's rows, flushed or not.

        Call it where no update is under way.

        Args:
            fqn: Table.
            row_ids: Integers of any shape, global, on this rank, as a tensor, an array or a list; may repeat.

        Raises:
            UnknownTableError: No such table is streamed on this rank.
            RowRangeError: A row is not on this rank.
            RequestError: The ids are no integers, as of a mask.
        """
        with self._lock:
            return fetch_rows(self._tables, fqn, row_ids)

    def evict(self, fqn: str, row_ids: npt.ArrayLike) -> int:
        """Have rows deleted in the store, for whoever evicts them: call it before their places are given away.

        The deletion travels with the next flush, is resent like any row, and costs no training step more than marking
        does. A row that changes again before that flush is sent with its new values instead; later, it comes back with
        them. What a row had to send before is forgotten.

        With several ranks each sends the deletions of its own rows; ids of others may be named. Of tables with virtual
        ids, each rank names those that it holds.

        Args:
            fqn: Table.
            row_ids: Integers of any shape, global, as a tensor, an array or a list; may repeat.

        Returns:
            Rows of this rank that are evicted.

        Raises:
            UnknownTableError: No such table is streamed.
            RowRangeError: A row is beyond the table; nothing is evicted.
            RequestError: The ids are no integers, as of a mask; nothing is evicted.
            UnsupportedModelError: A CUDA graph marks the table's rows on its device; nothing is evicted.
        """
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._delivery.settle()
            names = {name for tap in self._taps for name in tap.names}
            return self._evictor.evict(self._tables, fqn, row_ids, names_elsewhere=names)

    def register_pre_eviction_hook(self, hook: Callable[[str, torch.Tensor], None]) -> RemovableHandle:
        """Have a function called before rows are evicted.

        It gets the table's fqn and the global row ids, int64[n] on the CPU, of this rank, while `fetch` still returns
        their last values. What it raises ends the eviction. Hooks are called in the order of their registration.

        Returns:
            `remove()` ends it.
        """
        return self._evictor.register_hook(hook)

    def notify_eviction(self, fqn: str, row_ids: npt.ArrayLike) -> None:
        """Do what `evict` does."""
        self.evict(fqn, row_ids)

    def state_dict(self) -> dict[str, Any]:
        """Return what to put into the trainer's checkpoint, beside the model's and the optimizer's state.

        A few bytes, some a table, and the ids of rows that were evicted and not used since. Each rank has its own: save
        them all. After a `flush` of all ranks a resumed run has the least to send.
        """
        with self._lock:
            for tap in self._taps:
                tap.sweep()  # what no hook saw is not acked, either
            self._delivery.settle()
            server_ids, stats, places = self._server_ids, self.stats(), self._delivery.sender.places
            is_drained = not stats.num_dirty_rows and not stats.num_inflight_flushes
            state = RunState(
                run=self._delivery.writer.run,
                epoch=self.epoch,
                step=self._step,
                acked_step=stats.acked_step,
                # Asked last: then all that was read before is of one store.
                is_drained=is_drained and self._delivery.accounts_for_all,
                server_ids=server_ids,
                client=self._delivery.writer.client,
                places=places,
                evicted=unused_rows(self._tables, self._delivery.sender.deletions_on_their_way()),
                world_size=self._world.size,
                tables=tuple(sorted(digest_of(name) for tap in self._taps for name in tap.names)),
                layout=layout_of(self._tables),
            )
            return state.with_places_of(self._resumed).to_dict()

    def load_state_dict(
        self, state: Mapping[str, Any] | Iterable[Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> int:
        """Go on where a checkpoint was made: call it after the model's and the optimizer's state are loaded.

        Compares every row with the store's by digests and marks those that differ; see `run_state.py` for which rows
        else are sent. Steps count on from the checkpoint's. The epoch is this streamer's own, above the old one's.

        Args:
            state: What `state_dict` has returned on this rank; or a list of what it has on all ranks, which is needed
                where their number or the sharding has changed. With less, rows that the store lacks are sent whether
                or not they ever changed, and rows that other ranks had evicted may come back.
            timeout_s: For the comparison, seconds; None has no deadline.

        Returns:
            Rows of this rank that are marked to be sent or deleted.

        Raises:
            ConfigError: It is the state of another run, the states are not of one checkpoint, or no model is attached.
            UnavailableError: A shard does not answer.
        """
        states, layout = RunState.from_any(state), layout_of(self._tables)
        with self._lock:
            self._check_usable()
            writer, flusher = self._delivery.writer, self._delivery.flusher
            resumption = Resumption.of(states, client=writer.client, world_size=self._world.size, layout=layout)
            saved = resumption.first
            if saved.run != writer.run:
                raise ConfigError(f"the checkpoint is of run {saved.run!r}, this streamer of run {writer.run!r}")
            if not self._taps:
                raise ConfigError("attach the model before load_state_dict: its rows are compared with the store's")
            self._inherited.clear()
            for tap in self._taps:
                tap.sweep()  # or the next step would: what loading has written would count as used after the evictions
            self._delivery.settle()
            self._step = max(self._step, resumption.step)
            server_ids = self._server_ids
            if any(one.server_ids != server_ids for one in resumption.told):
                _log.warning("the checkpoint's store was another one: sending every row")
                flusher.mark_all()
            else:
                has_acked = self._inquiry.resume(self._tables, resumption, epoch=self.epoch, timeout_s=timeout_s)
                self._resumed = resumption.last_acked if has_acked else None
            self._evictor.evict_again(self._tables, resumption.evicted)
            return flusher.count_dirty_rows()

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
                if flush and self._delivery.failure is None and os.getpid() == self._pid:
                    self.flush(timeout_s)
            finally:
                self._is_closed = True
                for tap in self._taps:
                    tap.close()
                self._delivery.stop(is_child=os.getpid() != self._pid)
                if self._metrics is not None and os.getpid() == self._pid:
                    self._metrics.close()

    def stats(self) -> StreamerStats:
        """Return what this streamer has done and what is on its way.

        Thread: any.
        """
        return self._delivery.stats(self._step)

    def __reduce__(self) -> NoReturn:
        """Say why there is no pickle: a data loader's workers are given their dataset as one since Python 3.14."""
        raise TypeError("a streamer belongs to the process that made it: no copy or pickle of it can be made")

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
            self._delivery.add_tables(tap.tables)
        except BaseException:
            tap.close()
            raise
        self._taps.append(tap)
        self._tables += tap.tables

    def _on_step(self) -> None:
        """Be told by a tap that a step is over."""
        if os.getpid() != self._pid:
            return  # a child that trains a copy of the model: it is not this run
        with self._lock:
            self._end_step()

    def _tell_inherited(self) -> None:
        """Say once that the store may have rows of a former run that differ from this model's."""
        names, self._inherited = self._inherited, []
        _log.warning(
            "the store had %s before this run: rows there stay as they are until training changes them here; attach "
            "with publish='all' to send every row, or call load_state_dict to send those that differ",
            first_of(names),
        )

    def _end_step(self) -> None:
        if self._inherited:
            self._tell_inherited()
        self._step = self._step + 1 if self._given_step is None else self._given_step
        self._delivery.on_step(self._step, is_paused=self._is_paused)

    @property
    def _server_ids(self) -> tuple[str, ...]:
        return self._delivery.sender.server_ids

    def _check_usable(self, *, passes_failure: bool = False) -> None:
        if self._is_closed:
            raise ConfigError("this streamer is closed")
        if os.getpid() != self._pid:
            raise ConfigError("a streamer belongs to the process that made it, and this is a forked child")
        if not passes_failure:
            self._delivery.raise_failure()
