"""The public class: streams a model's embedding rows, and its dense part, to a parameter server as training goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar, Unpack

import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from headrace.kernels.module_walk import named_tensors
from headrace.kernels.plain_context import check_has_values, in_plain_context
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.address import parse_addresses, server_address
from headrace.paramserver.system.text import first_of, format_seconds
from headrace.paramserver.system.tracing import span
from headrace.schemas.errors import (
    ConfigError,
    HeadraceError,
    ReshardedError,
    SpecMismatchError,
    UnavailableError,
    UnknownTableError,
)
from headrace.schemas.table_names import model_of, path_of, table_name
from headrace.streamer.audit import AuditReport, TableAudit, audit_tables, differing_rows_of
from headrace.streamer.config import (
    StreamerConfig,
    StreamerSettings,
    check_run,
    step_number,
    timeout_seconds,
)
from headrace.streamer.copies import CopyDigests, CopyWatch, differing_copies, digest_copies
from headrace.streamer.delivery.first_rows import Beside, FirstRows, Publish, agree_on_first_rows
from headrace.streamer.delivery.pipeline import Delivery
from headrace.streamer.live_rows import Evictor, LiveRows, fetch_rows, unused_rows
from headrace.streamer.other_writers import OtherWriters, find_other_writers
from headrace.streamer.recorder import Recorder
from headrace.streamer.resume import Resumption, RunState, ask_store, digest_of, layout_of, mark_for_resume
from headrace.streamer.stats import MetricsPort, StreamerStats, describe_stats
from headrace.streamer.table_source import SourceTap, StreamedSource, TableSource
from headrace.streamer.taps.attach import Tap, check_has_new, is_attached_again, tap_model
from headrace.streamer.taps.dense_tensors import DenseTensors, find_dense_tensors
from headrace.streamer.taps.guards.tapped_modules import Left, leave, owners_of, take_left
from headrace.streamer.taps.local_parts import TableCopy
from headrace.streamer.taps.model_tree import listed_names, names_by_path
from headrace.streamer.taps.optimizer_rules import Dirty
from headrace.streamer.taps.table_settings import TableSettings
from headrace.streamer.taps.tapped_table import TappedTable
from headrace.streamer.unstreamed import find_unstreamed, list_new_tables, refuse_new_tables
from headrace.streamer.world import SoloWorld, World, current_world, together, warn_when_late

__all__ = ["RawEmbeddingStreamer", "detach"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# How long a recording waits for room for its rows: as long as earlier flushes need, but no outage.
_RECORD_TIMEOUT_S = 5.0
# Of `close`, at least, to end the run where its flush took nearly all of the time.
_END_TIMEOUT_S = 1.0
# Steps between two looks for what is trained and not streamed; at first they are at the powers of two.
_SEARCH_INTERVAL = 256
_LONG_S, _MAX_NAMED = 5.0, 5
_NOT_COMPARED = OtherWriters()


class RawEmbeddingStreamer:
    """Streams every embedding row that training changes, with its optimizer state, to a parameter server.

    With `dense=True` it also publishes all other parameters and buffers, whole, every few seconds.

        streamer = RawEmbeddingStreamer("127.0.0.1:7601", run="ctr-v7", model="ctr")
        streamer.attach(model, optimizer)
        ...  # train as before
        streamer.flush()
        streamer.close()

    Each step marks the rows that it changes. At its end a background thread sends their present values to the server.
    If the server is slow or away, training goes on, rows stay marked, and everything arrives later. If streaming cannot
    go on (another trainer has taken over the run, the store was replaced, a batch was refused), the next step, `flush`
    or `close` raises the reason; with `StreamerConfig.on_error="log"` steps log it once instead.

    Call `close` before the program ends: without it, updates that are not acked by then are lost.

    Thread: the training thread's, except `stats`, which any thread may call. In a forked child (a data loader's worker)
    steps do nothing, and methods raise. A streamer cannot be pickled for a spawned child.
    """

    @in_plain_context
    def __init__(
        self,
        address: str | None = None,
        *,
        run: str,
        config: StreamerConfig | None = None,
        world: World | None = None,
        **settings: Unpack[StreamerSettings],
    ) -> None:
        """Find every shard and take an epoch. A call of all ranks together.

        An older start of the run streams on until this one has attached a model: then it is fenced. If this one is
        refused, it goes on.

        Args:
            address: `host:port` of any shard, or of several with commas; the port defaults to 7601. None takes the
                environment's `HEADRACE_SERVER`.
            run: Name of the training job. Its ranks and restarts share it.
            config: Settings; None reads `settings`, the environment (`HEADRACE_STREAMER_…`) and the defaults.
            world: The ranks of the run; None takes those of `torch.distributed`.
            **settings: Fields of `StreamerConfig`, instead of `config`.

        Raises:
            ConfigError: The address, the run's name or a setting is wrong.
            UnavailableError: No server answers within `connect_timeout_s`.
            UnauthorizedError: The server refuses the credentials.
        """
        check_has_values()
        address = server_address(address)
        seeds = parse_addresses(address)
        check_run(run)
        if config is not None and settings:
            raise ConfigError(f"give settings in `config` or as arguments, not both: {', '.join(sorted(settings))}")
        self._config = config if config is not None else StreamerConfig.load(**settings)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._taps: list[Tap] = []
        self._tables: list[TappedTable] = []
        self._streamed: set[str] = set()  # names on the server of the tables of all ranks
        self._step = 0
        self._requested_step: int | None = None
        self._evictor = Evictor()
        self._unstreamed: dict[str, str] = {}  # what is trained and not streamed here, when it was looked for last
        self._preexisting: list[str] = []  # tables that the store had, whose rows the user wants to stay
        # Of the others that the store had, those with other rows there than here: a rank, and its first rows.
        self._unlike: dict[str, tuple[int, list[int]]] = {}
        self._older_start = ""  # of the run, which was connected when these were compared
        self._updated_only: set[str] = set()  # tables of which rows are absent until they change
        self._is_closed = False
        self._is_paused = False
        self._resumed: RunState | None = None
        self._loaded: list[RunState] = []
        self._world = world or current_world()
        with warn_when_late("RawEmbeddingStreamer(...)", rank=self._world.rank, world_size=self._world.size):
            self._delivery = Delivery(seeds, run=run, world=self._world, config=self._config)
        self._recorder: Recorder | None = None
        self._copies = CopyWatch(self._world, f"copies/{run}/{self.epoch}")
        self._metrics: MetricsPort | None = None
        if self._config.metrics_port is not None:
            host, port = self._config.metrics_host, self._config.metrics_port
            try:
                self._metrics = MetricsPort(self, run=run, rank=self._world.rank, host=host, base_port=port)
            except ConfigError:
                self._delivery.stop(is_child=False)
                raise

    @property
    def epoch(self) -> int:
        """Epoch of this start of the run, above those of all earlier ones; every sent row carries it."""
        return self._delivery.writer.epoch

    @property
    def model(self) -> str:
        """Model that the tables belong to: the setting `model`, else the run's name or the default model."""
        model = self._delivery.writer.model
        assert model is not None
        return model

    @property
    def metrics_port(self) -> int | None:
        """Port of the Prometheus page; None without one."""
        return None if self._metrics is None else self._metrics.port

    @property
    def config(self) -> StreamerConfig:
        """The settings."""
        return self._config

    @property
    def num_shards(self) -> int:
        """Number of shards of the store."""
        return len(self._delivery.store.shards)

    @property
    def tables(self) -> list[TappedTable]:
        """The tables, or parts of tables, that this rank streams; their specs have the names of the server."""
        return list(self._tables)

    @in_plain_context
    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        publish: Publish = "auto",
        tables: Iterable[str] | None = None,
        dense: bool | Iterable[str] = False,
        dense_states: bool = False,
        dirty: Dirty | None = None,
        weights_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        states: bool | Iterable[str] | Mapping[str, bool] = True,
        send_share: float | Mapping[str, float] | None = None,
        names: Mapping[str, str] | None = None,
        replace: bool = False,
    ) -> None:
        """Start streaming the embedding tables of a model, and its dense parameters. Can be called for several models.

        Called again for a model, with the same arguments or others, it takes in the tables that are trained by now and
        were not before, and dense tensors that are new; what streams goes on as it is. Until then `flush` and `close`
        refuse: they send all else, and raise.

        With `torch.distributed` initialized, all ranks must attach together, and all raise if one does. An error
        attaches nothing: all is compared with the server's, for all ranks, before anything is registered there.

        Args:
            model: A model with `nn.Embedding`, `nn.EmbeddingBag`, FBGEMM's table-batched embeddings or TorchRec's
                sharded modules.
            optimizer: The optimizers that train the tables; None if the tables have fused optimizers.
            publish: `all` sends every row first; `updated` sends rows once they change, whatever the server has.
                `auto` is `all` for tables that the server does not know or has not got all rows of, and sends the new
                rows of tables that have grown. It compares others with the server's, which reads and digests all
                rows, and goes on if they are equal; if they differ, nothing is registered, and the first step or
                `flush` raises, unless `load_state_dict` was called before, which sends what differs. Once rows were
                sent, an attach of more tables sends what differs if `load_state_dict` was called, and else raises
                itself. `all` replaces dense tensors of another shape, dtype or set of states.
            tables: Names of tables, or patterns such as `*.users.weight`, to stream only these; behind `!`, such as
                `!user.weight`, to leave these out. None for all. May be empty with `dense`.
            dense: Publish all parameters and persistent buffers that are no weights of embedding tables, whole, every
                `dense_interval_s`; or only those of these names and patterns.
            dense_states: Publish their optimizer states too.
            dirty: Which rows a step changes, if Headrace does not know a table's optimizer: those that it looks up
                (`lookups`), those with a gradient (`gradients`), or every row (`all`, and None). Wrong words leave old
                rows in the store; `audit` finds them. `all` is taken for known optimizers too.
            weights_dtype: Round the weights of larger types to this one, `torch.bfloat16` or `torch.float16`, to the
                nearest value: the wire, the store and replicas take as many bytes less, and audits compare the rounded
                values. Or a mapping to types from names or patterns of tables, of which the first counts. Such a table
                cannot be restored into a trainer. A value beyond float16's range becomes infinite.
            states: Send optimizer states with the weights, or only those of tables with these names and patterns.
                Without, `restore` brings weights only. Or a mapping from names or patterns to True or False, of which
                the first counts; other tables send theirs.
            send_share: Share of the changed rows, above 0, that a flush sends: those that have changed most since they
                were last sent. Others wait until they are among these, or for `max_staleness_s`; `flush` and `close`
                send all. Or a mapping from names or patterns of tables, of which the first counts; others send all
                rows, as do tables of integers or with identities. Takes 4 bytes a row. A table on a GPU is gathered by
                the host. Only when nothing waits is a step complete.
            names: By what names modules, tables and dense tensors are on the server, by their paths in the model, for
                modules that were renamed: the longest path that leads to a tensor counts. All other methods know a
                table by that name, and `restore` takes the same mapping.
            replace: Close other streamers of this process that stream a part of the model, as when a notebook's cell
                runs again. One of the same run is fenced by this one and may leave rows unsent, so all rows of its
                tables are sent once they are attached here, and steps count on. One of another run, or at another
                server, flushes first, and goes on if it cannot. Those that are closed stay so if this raises.

        Raises:
            ConfigError: A name or pattern in an argument matches nothing; the message lists the nearest. Or this
                streamer streams the model already; or other tables, and the server has other rows of these.
            UnsupportedModelError: A table cannot be streamed exactly, or is streamed already; or a parameter cannot be
                published.
            SpecMismatchError: The server has tables with these names and other shapes; the message lists all of them,
                and says how to go on.
            OwnedError: A table belongs to another run; give another `model`, or stop that run and set `takes_over`.
            UnavailableError: A shard cannot be reached.
        """
        _check_publish(publish)
        if dirty not in (None, "lookups", "gradients", "all"):
            raise ConfigError(f"dirty {dirty!r} is neither 'lookups', 'gradients' nor 'all'")
        dense = dense if isinstance(dense, bool) else listed_names(dense, argument="dense")
        if dense_states and not dense:
            raise ConfigError("dense_states: there is nothing to publish states of: say dense=True too")
        settings = TableSettings(weights_dtype=weights_dtype, states=states, send_share=send_share)
        optimizers = () if optimizer is None else optimizer
        with self._lock:
            self._check_usable()
            if replace:
                together(self._world, lambda: self._replace_others(model), "cannot replace its streamer")
            with warn_when_late("attach(...)", rank=self._world.rank, world_size=self._world.size):
                tap = tap_model(
                    model,
                    optimizers,
                    self._on_step,
                    tables=tables,
                    has_dense=bool(dense),
                    dirty=dirty,
                    owner=self,
                    earlier=self._taps,
                )
                tensors = None
                # Arguments may name the tables that an earlier attach of the model has taken.
                paths = tap.names.union(*(each.names for each in self._taps))
                try:
                    tensor_paths = [each.path for each in named_tensors(model)]
                    name = partial(names_by_path, names, paths, tensor_paths)
                    called = together(self._world, name, "cannot attach")[0]
                    for table in tap.tables:
                        table.call(called.get(table.path, table.path))
                    together(self._world, lambda: settings.apply(tap.tables, paths), "cannot attach")
                    if dense:
                        tensors = find_dense_tensors(
                            self._world,
                            model,
                            optimizers,
                            model_name=self.model,
                            names=None if dense is True else dense,
                            table_paths=paths,
                            has_states=dense_states,
                            called=called,
                        )
                        # Those of another model that have their names are refused.
                        if is_attached_again(tap) and not tensors.leave_out(self._delivery.flusher.dense.names):
                            check_has_new(tap)
                            tensors = None
                except BaseException:
                    tap.close()
                    raise
            self._publish(tap, tensors, publish, model=model, called=called)
            self._find_unstreamed()
            self._send_what_is_left(model, tap)

    def new_tables(self) -> list[str]:
        """Return the names of tables that are trained by now and not streamed, which another `attach` takes in.

        Empty where `attach` was told to leave them out. Looks at all modules, of this rank.
        """
        with self._lock:
            self._check_usable(passes_failure=True)
            return list_new_tables(self._find_unstreamed())

    def _replace_others(self, model: nn.Module) -> None:
        """Close the other streamers of a model, and note for which modules they may leave rows unsent."""
        writer, server_ids = self._delivery.writer, self._delivery.sender.server_ids
        for other in owners_of(model):
            if other is self:
                raise ConfigError("replace: this streamer streams the model already; attach it once")
            theirs = other._delivery
            is_same_run = (theirs.writer.run, theirs.sender.server_ids) == (writer.run, server_ids)
            if is_same_run and other.epoch > self.epoch:
                raise ConfigError(f"replace: run {writer.run!r} has a newer streamer in this process: attach with that")
            if is_same_run:
                state = other.state_dict()
                leave(other, Left(state["step"], state["evicted"]))
            else:
                other._flush(None)
            _log.info("%r is replaced by a streamer of epoch %d", other, self.epoch)
            other._close(flush=not is_same_run, is_replaced=is_same_run)

    def _send_what_is_left(self, model: nn.Module, tap: Tap) -> None:
        """Mark all rows of a tap, if streamers before may not have sent some of them."""
        left = take_left(model)
        if left and tap.tables:
            self._delivery.flusher.mark_all(tap.tables)
            whole = {table.spec.fqn for table in tap.tables}
            self._preexisting = [name for name in self._preexisting if name not in whole]
            self._unlike = {name: rows for name, rows in self._unlike.items() if name not in whole}
            if not self._unlike:
                self._delivery.register_held()
        for each in left:
            self._step = max(self._step, each.step)
            self._evictor.evict_again(tap.tables, each.evicted)

    @in_plain_context
    def attach_source(self, path: str, source: TableSource, *, publish: Publish = "auto") -> StreamedSource:
        """Start streaming a table that your own code holds by row id; say which rows change with `mark`.

        With `torch.distributed` initialized, all ranks must attach together, each a source of rows that no other has. A
        source ends no steps: where no model is attached that does, call `step`.

        Args:
            path: Name of the table within the model.
            source: Holds the rows.
            publish: As of `attach`, of the rows that the source marks.

        Raises:
            ConfigError: `publish` is none of them.
            UnsupportedModelError: The source's types or shapes are none of a table's.
            SpecMismatchError: The server has a table with this name and another shape; the message says how to go on.
            OwnedError: The table belongs to another run.
            UnavailableError: A shard cannot be reached.
        """
        _check_publish(publish)
        with self._lock:
            self._check_usable()
            tap = SourceTap(path, source)
            self._publish(tap, None, publish)
            return StreamedSource(tap.table)

    def _publish(
        self,
        tap: Tap,
        tensors: DenseTensors | None,
        publish: Publish,
        *,
        model: nn.Module | None = None,
        called: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        first_rows = self._add_tap(tap, tensors, publish=publish, model=model, called=called)
        own = {table.spec.fqn for table in tap.tables}
        whole = own if publish == "all" else first_rows.filled
        if publish == "all":
            for table in tap.tables:
                table.mark_all()
        else:
            for table in tap.tables:
                table.mark_padding()
        if publish == "updated":
            self._preexisting += sorted((own & self._delivery.store.tables.keys()) - whole)
        elif publish == "auto" and self._loaded:
            self._mark_later([table for table in tap.tables if table.spec.fqn not in whole])

    def _compare_known(
        self, tables: Sequence[TappedTable], first_rows: FirstRows, others: OtherWriters
    ) -> OtherWriters:
        """Note which tables the server has with other rows than this model, on any rank; all ranks call it together.

        Of tables that grow only rows before the new ones count. Nothing is compared again where the `others` have
        written nothing since; returns them as of now. Nothing is refused before anything was sent: `load_state_dict`
        may follow, and sends what differs; until then nothing is registered. A rank that has called it compares
        nothing, and sends what differs once the tables are attached.

        Raises:
            ConfigError: Some differ, and other tables stream already.
        """
        begin_s, writer = time.monotonic(), self._delivery.writer

        async def ask(reader: EmbeddingReader) -> dict[str, list[int]]:
            nonlocal others
            known = others
            if first_rows.writers:
                others = await find_other_writers(reader, first_rows.writers, run=writer.run, epoch=writer.epoch)
            if known is not _NOT_COMPARED and known.batches == others.batches:
                return {}
            return await differing_rows_of(tables, reader, before=first_rows.grown)

        def compare() -> dict[str, list[int]]:
            return {} if self._loaded else self._ask_store(ask, None)

        unlike: dict[str, tuple[int, list[int]]] = {}
        for rank, of_rank in enumerate(together(self._world, compare, "cannot attach")):
            for name, row_ids in of_rank.items():
                unlike.setdefault(name, (rank, row_ids))
        if (duration_s := time.monotonic() - begin_s) > _LONG_S:
            _log.info("compared all rows with the server's in %s", format_seconds(duration_s))
        if unlike and first_rows.after_step >= 0:
            raise _unlike_error(unlike)
        self._unlike, self._older_start = unlike | self._unlike, others.older_start
        return others

    def _check_like(self) -> None:
        """End streaming, before anything is sent, if the model is not what the server has and nobody said what counts.

        Raises:
            ConfigError: It is not; not with `on_error="log"`.
        """
        if not self._unlike:
            return
        error = _unlike_error(self._unlike, self._older_start)
        self._unlike.clear()
        self._delivery.failure = error
        if self._config.on_error == "raise":
            raise error
        _log.error("streaming has stopped, training goes on: %s", error)

    @in_plain_context
    def step(self, step: SupportsIndex | None = None) -> None:
        """End a training step, to number it or to end it early.

        Steps end without this call. But for a model without a torch optimizer a step ends only when the next one
        begins. Do not call it during an update.

        Args:
            step: Number of the step; None takes the next one. Numbers never fall, and later steps count on from here.

        Raises:
            ConfigError: The number is not an integer, or below the last one.
            HeadraceError: Streaming has ended; not with `on_error="log"`.
        """
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._requested_step = None if step is None else step_number(step, after=self._step)
            try:
                # A tap that had updates calls `_on_step`. Call them all: no `any` over a generator.
                has_ended = [tap.end_step() for tap in self._taps]
                if not any(has_ended):
                    self._finish_step()
            finally:
                self._requested_step = None

    def pause(self) -> None:
        """Send nothing when steps end, until `resume`. Changed rows stay marked and go out then.

        Steps are still counted, and `flush` and `close` still send everything.
        """
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._is_paused = True

    def resume(self) -> None:
        """Send changed rows again, from the end of the next step on."""
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._is_paused = False

    @property
    def is_paused(self) -> bool:
        """Whether streaming is paused."""
        return self._is_paused

    @in_plain_context
    def flush(self, timeout_s: float | None = None) -> None:
        """Send all changed rows and all dense parameters, and return when they are durable on every shard.

        If a dense parameter is a DTensor (`fully_shard`, tensor parallel), all ranks must call it together;
        a rank that does not come within `timeout_s` is named in the error.

        Args:
            timeout_s: How long to wait, seconds; None takes `flush_timeout_s`. Rows not sent by then stay marked and go
                out later.

        Raises:
            UnavailableError: Not everything is durable in time; the message says what is missing, and where.
            ConfigError: `timeout_s` is not a number, or a signal handler called this during a flush.
            UnsupportedModelError: A table is trained since `attach` and not streamed; all others are sent.
            HeadraceError: Streaming has ended, also with `on_error="log"`.
        """
        with self._lock:
            self._flush(timeout_s)
            refuse_new_tables(self._find_unstreamed())

    def _flush(self, timeout_s: float | None) -> None:
        with self._lock:
            self._check_like()
            self._check_usable()
            timeout_s = self._config.flush_timeout_s if timeout_s is None else timeout_seconds(timeout_s)
            if not (self._taps or self._delivery.is_half_made):
                return  # a mark of a step would make a start count that has attached nothing
            for tap in self._taps:
                tap.end_step()
            with span("headrace.flush", run=self._delivery.writer.run, step=self._step):
                # Only DTensors make ranks wait for one another.
                num_ranks = self._world.size if self._delivery.flusher.dense.is_sharded else 1
                with warn_when_late("flush()", rank=self._world.rank, world_size=num_ranks):
                    self._delivery.flush(self._step, timeout_s)

    @in_plain_context
    def record(self, inputs: Any, outputs: Any) -> bool:
        """Record what the model answers at this step, for `RecordingCheck` to compare with what a replica serves.

            optimizer.step()
            streamer.record((users, items), model)

        Call it after each step. Only the first call, and then one of `record_every_steps` steps, does something: it
        computes the outputs and hands over all that the step changed, and the dense parameters, so that replicas by
        step show exactly this step. That costs a pass of the model and a flush, whose acks are not awaited. A
        background thread writes the file to `recordings`. If a shard is away or the writer is behind, the recording is
        dropped and counted (`stats`). While streaming is paused nothing is due.

        With several ranks, all call it at the same steps, and rank 0 writes its own batch. If a dense parameter is a
        DTensor and one rank cannot record the step, no rank does.

        Args:
            inputs: The batch: tensors and TorchRec's KeyedJaggedTensor, JaggedTensor and KeyedTensor, also in lists,
                tuples and dicts; numbers and texts. A tuple is the arguments of the model.
            outputs: What the model answers to it, in eval mode, of the same types. Or the model itself, or a function:
                it is called with the inputs when a recording is due, without gradients and autocast; a module in eval
                mode.

        Returns:
            Whether the step is recorded.

        Raises:
            ConfigError: `recordings` is not set, something cannot be recorded, or it is larger than 256 MiB.
            HeadraceError: Streaming has ended; not with `on_error="log"`.
        """
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._check_like()
            recorder = self._make_recorder()
            for tap in self._taps:
                tap.end_step()
            if self._is_paused or not recorder.is_due(self._step):
                return False
            recording = recorder.take(self._step, inputs, outputs)
            try:
                self._delivery.end_recorded(self._step, _RECORD_TIMEOUT_S)
            except HeadraceError as exc:
                if not exc.retriable and self._config.on_error == "raise":
                    raise
                recorder.drop(self._step, exc)
                return False
            return recorder.write(recording)

    def _make_recorder(self) -> Recorder:
        if self._recorder is None:
            if self._config.recordings is None:
                raise ConfigError("record: set `recordings` to a folder or the URL of an object store")
            self._recorder = Recorder(
                self._config.recordings,
                run=self._delivery.writer.run,
                model=self.model,
                epoch=self.epoch,
                every_steps=self._config.record_every_steps,
                max_kept=self._config.max_recordings,
                writes=self._world.rank == 0,
            )
        return self._recorder

    @in_plain_context
    def audit(self, *, only_present: bool = False, timeout_s: float | None = None) -> AuditReport:
        """Flush, then compare every row with the store's by digests and report the rows that differ.

        All ranks must call it: each compares its own rows, and all get the report of all ranks. A row that the store
        lacks makes it unequal, unless it expired, was evicted, or was not to be sent before it changes
        (`publish="updated"`); the report counts each kind. So does a table that is trained and not streamed, unless
        `attach` was told to leave it out by name, and so do ranks that should have the same rows (data parallel,
        replicated DTensors) and have not.

        Args:
            only_present: Accept all rows that the store lacks.
            timeout_s: For the flush, and again for the comparison, seconds. None takes `flush_timeout_s` for the flush
                and no deadline for the comparison.

        Raises:
            UnavailableError: Not everything is durable in time, or a shard does not answer.
            HeadraceError: Streaming has ended, or another rank has failed.
        """

        def audit() -> tuple[list[TableAudit], dict[str, str], CopyDigests]:
            self._flush(timeout_s)
            work = partial(audit_tables, self._tables, rank=self._world.rank, updated_only=self._updated_only)
            return self._ask_store(work, timeout_s), self._find_unstreamed(), digest_copies(copies)

        with self._lock:
            copies = self._table_copies()
            audits, unstreamed, digests = zip(*together(self._world, audit, "could not audit"), strict=True)
            gather = lambda work: together(self._world, work, "could not audit")  # noqa: E731
            return AuditReport(
                tables=tuple(itertools.chain.from_iterable(audits)),
                only_present=only_present,
                step=self._step,
                preexisting=tuple(self._preexisting),
                unstreamed=dict(itertools.chain.from_iterable(each.items() for each in unstreamed)),
                copies=tuple(differing_copies(copies, digests, gather)),
            )

    @in_plain_context
    def fetch(self, fqn: str, row_ids: npt.ArrayLike) -> LiveRows:
        """Return copies of present weights and states of rows, flushed or not. Do not call it during an update.

        Weights that are stored rounded come rounded.

        Args:
            fqn: Name of the table.
            row_ids: Global ids of rows on this rank: integers of any shape, as a tensor, array or list; may repeat.

        Raises:
            UnknownTableError: This rank streams no such table.
            RowRangeError: A row is not on this rank.
            RequestError: The ids are not integers, for example a mask.
        """
        with self._lock:
            self._check_no_dense(fqn)
            return fetch_rows(self._tables, self._name_of(fqn), row_ids)

    @in_plain_context
    def evict(self, fqn: str, row_ids: npt.ArrayLike) -> int:
        """Have the next flush delete rows in the store. Call it before the rows' places are reused.

        Unsent changes of these rows are dropped. A deletion costs a step no more than marking does. A row that changes
        again before the flush is sent with its new values instead; one that changes later comes back.

        Each rank sends the deletions of its own rows and ignores other ranks' ids. For tables with virtual ids, each
        rank must name only the ids that it holds. An error evicts nothing.

        Args:
            fqn: Name of the table.
            row_ids: Global ids of rows: integers of any shape, as a tensor, array or list; may repeat.

        Returns:
            Number of rows evicted on this rank.

        Raises:
            UnknownTableError: No such table is streamed.
            RowRangeError: A row is beyond the table.
            RequestError: The ids are not integers, for example a mask.
            UnsupportedModelError: A CUDA graph marks the table's rows on its device.
        """
        with self._lock:
            self._check_usable(passes_failure=self._config.on_error == "log")
            self._check_no_dense(fqn)
            self._delivery.settle()
            return self._evictor.evict(self._tables, self._name_of(fqn), row_ids, names_elsewhere=self._names())

    def register_pre_eviction_hook(self, hook: Callable[[str, torch.Tensor], None]) -> RemovableHandle:
        """Register a function to call before rows are evicted; the returned handle's `remove()` unregisters it.

        It gets the table's name and the global ids, int64[n] on the CPU, of this rank's rows, while `fetch` still
        returns their last values. An exception in it cancels the eviction. Hooks run in the order of registration.
        """
        return self._evictor.register_hook(hook)

    def notify_eviction(self, fqn: str, row_ids: npt.ArrayLike) -> None:
        """Call `evict`."""
        self.evict(fqn, row_ids)

    @in_plain_context
    def state_dict(self) -> dict[str, Any]:
        """Return the streamer's part of a checkpoint; save it beside the model's and the optimizer's state.

        Holds some bytes per table, and the ids of rows that were evicted and not used since. Save every rank's. If all
        ranks `flush` before, a resumed run has the least to send.
        """
        return self._own_state().to_dict()

    @in_plain_context
    def state_of_all_ranks(self) -> str:
        """Return every rank's `state_dict`, on every rank, as one text. All ranks call it together.

        `torch.distributed.checkpoint` flattens dicts and keeps one rank's value of a key. It keeps this text whole.

        Raises:
            UnavailableError: A rank has not called within `flush_timeout_s`, or rows on their way from a GPU have not
                arrived.
            HeadraceError: Another rank has ended.
        """
        state = self._own_state().to_dict()
        self._world.meet("state_of_all_ranks", self._config.flush_timeout_s)
        return json.dumps(self._world.gather(state))

    def _own_state(self) -> RunState:
        with self._lock:
            for tap in self._taps:
                tap.sweep()  # writes that no hook saw are not acked either
            self._delivery.settle()
            sender = self._delivery.sender
            server_ids, stats, places = sender.server_ids, self.stats(), sender.places
            num_unsent = stats.num_dirty_rows + stats.num_waiting_rows
            is_drained = not num_unsent and not stats.num_inflight_flushes
            state = RunState(
                run=self._delivery.writer.run,
                epoch=self.epoch,
                step=self._step,
                acked_step=stats.acked_step,
                # Read last: if it is true, everything read above is of one store.
                is_drained=is_drained and self._delivery.accounts_for_all,
                server_ids=server_ids,
                client=self._delivery.writer.client,
                places=places,
                evicted=unused_rows(self._tables, sender.deletions_on_their_way()),
                world_size=self._world.size,
                tables=tuple(sorted(map(digest_of, self._names()))),
                layout=layout_of(self._tables),
            )
            return state.with_places_of(self._resumed)

    @in_plain_context
    def load_state_dict(
        self, state: str | Mapping[str, Any] | Iterable[Mapping[str, Any]], *, timeout_s: float | None = None
    ) -> int:
        """Resume from a checkpoint. Call it after the model's and the optimizer's state are loaded.

        Compares every row with the store's by digests and marks those that differ, and rows that the store may have
        lost. Steps count on from the checkpoint's. The epoch stays this streamer's own, which is higher than the
        checkpoint's.

        Args:
            state: What `state_of_all_ranks` returned, or this rank's `state_dict()`, or a list of all ranks'.
                All ranks' states are needed if the number of ranks or the sharding has changed. With fewer, rows that
                the store lacks are sent even if they never changed, and rows evicted on other ranks may come back.
            timeout_s: For the comparison, seconds; None has no deadline.

        Returns:
            Number of rows on this rank that are marked to be sent or deleted.

        Raises:
            ConfigError: The state is of another run, the states are not of one checkpoint, or no model is attached.
            UnavailableError: A shard does not answer.
        """
        states = RunState.from_any(state)
        with self._lock:
            self._check_usable()
            saved, writer = self._resumption(states).first, self._delivery.writer
            if saved.run != writer.run:
                raise ConfigError(
                    f"the checkpoint is of run {saved.run!r}, but this streamer is of run {writer.run!r}: "
                    "give this one that run"
                )
            if not self._taps:
                raise ConfigError("attach the model before load_state_dict: its rows are compared with the store's")
            self._delivery.register_held()
            self._preexisting.clear()
            self._unlike.clear()
            for tap in self._taps:
                tap.sweep()  # now: a later sweep would take loaded rows for rows used after their eviction
            self._delivery.settle()
            self._step = max(self._step, self._resumption(states).step)
            self._loaded = states
            self._mark_for_resume(self._tables, timeout_s)
            return self._delivery.flusher.count_dirty_rows()

    def _resumption(self, states: list[RunState]) -> Resumption:
        client, layout = self._delivery.writer.client, layout_of(self._tables)
        return Resumption.of(states, client=client, world_size=self._world.size, layout=layout)

    def _mark_for_resume(self, tables: Sequence[TappedTable], timeout_s: float | None) -> None:
        """Mark what tables, known to the server, have to send after the loaded states."""
        resumption = self._resumption(self._loaded)
        server_ids = self._delivery.sender.server_ids
        lacks_acked = resumption.lacks_acked(server_ids, self._delivery.store)
        if lacks_acked is None:
            _log.warning("the checkpoint is of another store: sending every row")
            self._delivery.flusher.mark_all(tables)
        else:
            mark = partial(mark_for_resume, tables, resumption, self.epoch, lacks_acked=lacks_acked)
            has_acked = self._ask_store(mark, timeout_s)
            self._resumed = resumption.last_acked(server_ids) if has_acked else None
        self._evictor.evict_again(tables, resumption.evicted)

    def _mark_later(self, tables: Sequence[TappedTable]) -> None:
        """Mark what tables that were attached after `load_state_dict` have to send; every row if that is not known."""
        if not tables:
            return
        try:
            self._mark_for_resume(tables, None)
        except BaseException as exc:
            names = first_of([table.spec.fqn for table in tables])
            _log.warning("sending every row of %s: they could not be compared with the store's: %s", names, exc)
            self._delivery.flusher.mark_all(tables)
            if not isinstance(exc, HeadraceError):
                raise

    def close(self, *, flush: bool = True, timeout_s: float | None = None) -> None:
        """Flush, remove all hooks, close the connections and stop the thread, even if this raises. Idempotent.

        Once it has returned on all ranks the run has ended: other runs may take its tables. Without the flush, after an
        error, or if the server is gone once all is durable (a warning says so), the tables stay the run's, as after a
        crash.

        Args:
            flush: Send changed rows and wait until they are durable; False drops what is not acked.
            timeout_s: For all of it, seconds; None takes `flush_timeout_s`.

        Raises:
            UnavailableError: Not everything is durable in time.
            HeadraceError: Streaming has ended, and no call has raised that yet.
        """
        self._close(flush=flush, timeout_s=timeout_s)

    @in_plain_context
    def _close(self, *, flush: bool, timeout_s: float | None = None, is_replaced: bool = False) -> None:
        with self._lock:
            if self._is_closed:
                return
            try:
                # An earlier call has raised the failure, if there is one.
                if flush and self._taps and self._delivery.failure is None and os.getpid() == self._pid:
                    timeout_s = self._config.flush_timeout_s if timeout_s is None else timeout_seconds(timeout_s)
                    deadline_s = time.monotonic() + timeout_s
                    self.flush(timeout_s)
                    try:
                        self._delivery.end_run(max(deadline_s - time.monotonic(), _END_TIMEOUT_S))
                    except UnavailableError as exc:
                        _log.warning("all is durable, but the server has not heard that the run has ended: %s", exc)
            finally:
                self._is_closed = True
                for tap in self._taps:
                    tap.close()
                self._delivery.stop(is_child=os.getpid() != self._pid, is_replaced=is_replaced)
                if self._recorder is not None and os.getpid() == self._pid:
                    self._recorder.close()
                if self._metrics is not None and os.getpid() == self._pid:
                    self._metrics.close()

    def stats(self) -> StreamerStats:
        """Return the streamer's present figures.

        Thread: any.
        """
        stats, recorder = self._delivery.stats(self._step), self._recorder
        stats = dataclasses.replace(stats, num_unstreamed=len(self._unstreamed))
        if recorder is None:
            return stats
        num_written, num_dropped = recorder.num_written, recorder.num_dropped
        return dataclasses.replace(stats, num_recordings=num_written, num_recordings_dropped=num_dropped)

    def __repr__(self) -> str:
        delivery = self._delivery
        what = f"<RawEmbeddingStreamer of run {delivery.writer.run!r}, model {self.model!r}, to {delivery.address}"
        if self._world.size > 1:
            what += f", rank {self._world.rank} of {self._world.size}"
        if self._is_closed:
            return f"{what}: closed>"
        left_out = f"; not streamed: {first_of(sorted(self._unstreamed))}" if self._unstreamed else ""
        return f"{what}: {describe_stats(self.stats(), len(self._tables), self._config)}{left_out}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the line of `repr`, the tables, and what is trained and not streamed."""
        rows = "".join(
            f"<tr><td>{html.escape(table.spec.fqn)}</td><td>{table.num_local_rows:,} × {table.shard.width}</td>"
            f"<td>{table.spec.dtype.name.lower()}</td><td>{table.dirty.count:,}</td></tr>"
            for table in self._tables
        )
        rows += "".join(
            f"<tr><td>{html.escape(name)}</td><td colspan=3>not streamed: {html.escape(reason)}</td></tr>"
            for name, reason in self._unstreamed.items()
        )
        head = "<tr><th>table</th><th>rows × columns here</th><th>type</th><th>rows to send</th></tr>"
        return f"<p>{html.escape(repr(self)[1:-1])}</p><table>{head}{rows}</table>"

    def __reduce__(self) -> NoReturn:
        """Refuse pickling, which data loaders use for their workers since Python 3.14."""
        raise TypeError("a streamer belongs to the process that made it: it cannot be copied or pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is None:
            self.close()
            return
        try:
            # Training has failed, perhaps during an update, so unsent rows may be inconsistent.
            self.close(flush=False)
        except HeadraceError as close_error:
            _log.warning("closing the streamer: %s", close_error)

    @in_plain_context
    def attach_tap(self, make_tap: Callable[[Callable[[], None]], Tap]) -> None:
        """Stream the tables of a custom tap, as `headrace.res.install` does. An error attaches nothing.

        After `load_state_dict` their rows are compared with the store's.

        Args:
            make_tap: Creates the tap; gets the function that the tap must call at each step boundary, on the training
                thread.

        Raises:
            SpecMismatchError: The server has a table with this name and another shape.
            OwnedError: A table belongs to another run.
            UnavailableError: A shard cannot be reached.
        """
        with self._lock:
            self._check_usable()
            tap = make_tap(self._on_step)
            self._add_tap(tap, publish="updated", world=SoloWorld())
            if self._loaded:
                self._mark_later(tap.tables)

    def _check_no_dense(self, fqn: str) -> None:
        if self._name_of(fqn) in self._delivery.flusher.dense.names:
            raise UnknownTableError(f"{fqn!r} is a dense tensor, which goes out whole: name a table")

    def _add_tap(
        self,
        tap: Tap,
        dense: DenseTensors | None = None,
        *,
        publish: Publish,
        world: World | None = None,
        model: nn.Module | None = None,
        called: Mapping[str, str] = MappingProxyType({}),
    ) -> FirstRows:
        """Stream a tap's tables; return which of their rows go out at first, as the ranks of a world agree.

        `called` has the names on the server of those paths that are none.
        """
        for table in tap.tables:
            table.join_model(self.model)
        try:
            own_names = {table_name(self.model, called.get(path, path)) for path in tap.names}
            in_model = () if model is None else [each.path for each in named_tensors(model)]
            whole_names = {table_name(self.model, called.get(path, path)) for path in in_model}
            beside = Beside(
                run=self._delivery.writer.run,
                dense=() if dense is None else [each.spec for each in dense.all],
                names=frozenset(self._names() | own_names | whole_names),
            )
            first_rows = agree_on_first_rows(
                self._world if world is None else world,
                [table.spec for table in tap.tables],
                self._delivery.find_store,
                publish=publish,
                last_step=self._delivery.flusher.last_step,
                beside=beside,
            )
            if world is not None and first_rows.filled:  # its ranks may come at different times
                names = first_of(sorted(first_rows.filled))
                raise SpecMismatchError(f"{names}: not all rows are in the store yet: attach the model itself")

            others = _NOT_COMPARED

            def compare(filled: frozenset[str]) -> bool:
                nonlocal others
                if publish == "auto" and (first_rows.complete or first_rows.grown):  # as all ranks see it
                    known = [
                        table
                        for table in tap.tables
                        if table.spec.fqn not in filled
                        and table.row_offset < first_rows.grown.get(table.spec.fqn, table.row_offset + 1)
                    ]
                    others = self._compare_known(known, first_rows, others)
                return not self._unlike

            filled = self._delivery.add_tables(
                tap.tables,
                dense,
                first_rows=first_rows,
                world=self._world if world is None else world,
                compare=compare,
            )
            first_rows = dataclasses.replace(first_rows, filled=filled)
        except BaseException:
            tap.close()
            raise
        own = {table.spec.fqn for table in tap.tables}
        self._updated_only |= own if publish == "updated" else first_rows.updated_only
        if first_rows.filled:
            _log.info("sending %s whole: the server lacks rows", first_of(sorted(first_rows.filled)))
        if first_rows.grown:
            _log.info("sending the new rows of %s: it has grown", first_of(sorted(first_rows.grown)))
        if first_rows.replaced:
            _log.info("replaced dense tensors that were otherwise: %s", first_of(sorted(first_rows.replaced)))
        if first_rows.alike and self._world.rank == 0:
            _warn_of_renamed(first_rows.alike)
        self._taps.append(tap)
        self._streamed |= own_names
        self._tables += tap.tables
        return first_rows

    def _find_unstreamed(self) -> dict[str, str]:
        """Find what is trained and not streamed here, by path with the reason, and remember it for `stats`."""
        dense = self._delivery.flusher.dense.paths
        self._unstreamed = find_unstreamed(self._taps, is_published=dense.__contains__)
        self._delivery.flusher.num_unstreamed = len(self._unstreamed)
        return self._unstreamed

    def _warn_of_unstreamed(self) -> None:
        """Warn of tables that have come to be trained and are not streamed, since they were looked for last."""
        known = self._unstreamed
        if new := [name for name in list_new_tables(self._find_unstreamed()) if name not in known]:
            _log.warning("%s is not streamed: %s", first_of(new), self._unstreamed[new[0]])

    def _table_copies(self) -> list[TableCopy]:
        return [copy for tap in self._taps for copy in tap.copies()]

    def _names(self) -> set[str]:
        """Return the tables' names on the server, of all ranks."""
        return set(self._streamed)

    def _name_of(self, fqn: str) -> str:
        """Return the name of a table that a caller names, with or without its model."""
        return fqn if model_of(fqn) == self.model else table_name(self.model, fqn)

    def _on_step(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that trains its copy of the model is not this run
        with self._lock:
            self._finish_step()

    def _finish_step(self) -> None:
        self._check_like()
        self._step = self._step + 1 if self._requested_step is None else self._requested_step
        if _is_looked_for(self._step):
            self._warn_of_unstreamed()
        self._copies.on_step(self._step, self._table_copies)
        if self._taps or self._delivery.is_half_made:  # otherwise as for a flush
            self._delivery.on_step(self._step, is_paused=self._is_paused)

    def _ask_store(self, ask: Callable[[EmbeddingReader], Awaitable[_T]], timeout_s: float | None) -> _T:
        while True:
            try:
                return ask_store(self._delivery.addresses, self._config, ask, timeout_s)
            except ReshardedError as exc:
                self._delivery.switch(exc)

    def _check_usable(self, *, passes_failure: bool = False) -> None:
        if self._is_closed:
            raise ConfigError("this streamer is closed: make a new one")
        check_has_values()
        if os.getpid() != self._pid:
            raise ConfigError(
                "a streamer belongs to the process that made it, but this is a forked child: make another one here"
            )
        if not passes_failure:
            self._delivery.raise_failure()


def _unlike_error(unlike: Mapping[str, tuple[int, list[int]]], older_start: str = "") -> ConfigError:
    """Return why tables cannot be streamed that the server has with other rows: by name a rank, and its first rows."""
    name, (rank, row_ids) = next(iter(unlike.items()))
    rows = f", as in rows {', '.join(map(str, row_ids[:_MAX_NAMED]))} of {name} on rank {rank}" if row_ids else ""
    older = f"; an older start of this run, {older_start}, streams on: stop it first" if older_start else ""
    return ConfigError(
        f"the server has other rows of {first_of(sorted(unlike))} than the model{rows}; nothing was sent{older}: "
        "call headrace.restore(model, optimizer, …) before attach to go on from the server's, or load_state_dict "
        "to go on from a checkpoint; or attach with publish='all' to replace them, or with publish='updated' to "
        "send rows once they change and leave the others, which are then other rows than the model's"
    )


def _warn_of_renamed(alike: Mapping[str, str]) -> None:
    """Warn of new tables beside ones of the same shape that the model lacks, which are by plain name in `alike`."""
    names = {path_of(new): path_of(old) for new, old in alike.items()}
    _log.warning(
        "%s new to the server, which has tables of the same shape that this model lacks: %s. If the modules were only "
        "renamed, restore and attach with names=%r to go on with those tables (or with paths and names of modules, "
        "for their dense tensors too), and drop the new ones if they are there by then (headrace table drop). If not, "
        "drop those that are left",
        "1 table is" if len(alike) == 1 else f"{len(alike)} tables are",
        first_of([f"{new} may be {old}" for new, old in alike.items()]),
        names,
    )


def _is_looked_for(step: int) -> bool:
    """Return whether the end of a step looks for what is trained and not streamed, which goes over all modules."""
    return step % _SEARCH_INTERVAL == 0 or (step < _SEARCH_INTERVAL and step & (step - 1) == 0)


def _check_publish(publish: str) -> None:
    if publish not in ("auto", "updated", "all"):
        raise ConfigError(f"publish {publish!r} is neither 'auto', 'updated' nor 'all'")


def detach(model: nn.Module) -> int:
    """Close every streamer of this process that streams a part of a model; return how many there were.

    Each flushes first, as `RawEmbeddingStreamer.close` does, and raises what that raises. For a notebook that has lost
    its streamer.
    """
    streamers = owners_of(model)
    with contextlib.ExitStack() as stack:  # closes all, whichever fails
        for streamer in streamers:
            stack.callback(streamer.close)
    return len(streamers)
