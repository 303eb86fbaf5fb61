"""The trainer of the chaos harness: a process of its own that trains, streams, and reports what it was acked.

It trains two small torch models of several sparse tables and a dense tower; the tensors of both have the same paths.
Beside their streamers runs a raw writer, whose tables have what no tap gives yet: deletes, identities, virtual row ids,
and rows split by columns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pickle
import random
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from chaos_ledger import UNKNOWN_SEQ, acked_deltas
from chaos_model import DENSE_SPECS, GROWING, MAX_ROWS, MODELS, TORCH_TABLES, Ranker, outputs_of

from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.address import parse_addresses
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.idl import idl
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.schemas.version import Version
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.channel import ShardChannel
from headrace.streamer.delivery.rendezvous import Rendezvous, Writer
from headrace.streamer.flush.layout import Message

RAW_SPECS = (
    TableSpec(
        fqn="raw.ids",
        num_rows=0,
        dim=4,
        dtype=DType.FLOAT32,
        states=(StateSpec(name="rowwise", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
        has_identities=True,
    ),
    TableSpec(
        fqn="raw.split",
        num_rows=400,
        dim=8,
        dtype=DType.FLOAT16,
        states=(StateSpec(name="pointwise", kind=StateKind.POINTWISE, dtype=DType.FLOAT32),),
    ),
)
RAW_ROWS = {
    "raw.ids": np.arange(256, dtype=np.int64) * 1_000_003 + 2**40,
    "raw.split": np.arange(0, 400, 2, dtype=np.int64),
}
ROWS: dict[str, npt.NDArray[np.int64]] = {
    **{
        f"{model}:{name}.weight": np.arange(MAX_ROWS if name == GROWING else rows, dtype=np.int64)
        for model in MODELS
        for name, (rows, _) in TORCH_TABLES.items()
    },
    **{f"{model}:{path}": np.arange(spec.num_rows) for model in MODELS for path, spec in DENSE_SPECS.items()},
    **RAW_ROWS,
}
DIMS = {
    **{f"{model}:{name}.weight": dim for model in MODELS for name, (_, dim) in TORCH_TABLES.items()},
    **{f"{model}:{path}": spec.dim for model in MODELS for path, spec in DENSE_SPECS.items()},
    **{spec.fqn: spec.dim for spec in RAW_SPECS},
}

_WAIT_S = 60.0
_MAX_OUTSTANDING = 32
_STEP_PAUSE_S = 0.004
_DENSE_INTERVAL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainerOrder:
    """What a trainer is told when it starts: where the server is, its seed, and a policy with its spool.

    `num_grown` rows were added to the growing table of both models. It `resends` what a shard has lost, or ends.
    """

    address: str
    seed: int
    policy: str
    spool_dir: Path
    num_grown: int = 0
    resends: bool = False


def run_trainer(order: TrainerOrder, commands: Connection, reports: Connection) -> None:
    """Train until killed.

    Takes `flush`, and then `go on`, from `commands`. Reports, pickled: `("ready", epoch)`, `("acked", deltas, shard,
    seq)`, `("computed", model, version, outputs)`, `("flushed", is_equal, comparison, versions)`, `("failed", why)`.
    """
    lock = threading.Lock()

    def report(*what: Any) -> None:
        with lock:
            reports.send_bytes(pickle.dumps(what))

    logging.disable(logging.WARNING)  # of lost connections there will be many
    warnings.simplefilter("ignore")  # torch's, about its own sparse tensors
    try:
        _report_acks(report)
        _Trainer(order, report).run(commands)
    except (Exception, KeyboardInterrupt):
        report("failed", traceback.format_exc())


def _report_acks(report: Callable[..., None]) -> None:
    """Report each batch in the moment in which its ack is known, and before anything follows from that."""
    ack_first = ShardChannel._ack_first

    def ack_and_report(self: Any) -> None:
        batch = self._unacked[0]
        # Acks come out of order, and a later one's place is an upper bound.
        seq = self.place[1] if self.place[0] >= batch.client_seq else UNKNOWN_SEQ
        report(
            "acked", acked_deltas(self._writer.epoch, batch.message.step, batch.message.deltas), self.shard.shard, seq
        )
        ack_first(self)

    ShardChannel._ack_first = ack_and_report  # type: ignore[method-assign]


class _ModelTrainer:
    """One of the two models, and its run."""

    def __init__(self, order: TrainerOrder, model: str, config: StreamerConfig, report: Callable[..., None]) -> None:
        self._report = report
        self._num_steps = 0
        self._random = np.random.default_rng(order.seed)
        self.name, self._model = model, Ranker(num_grown=order.num_grown)
        self._optimizer = torch.optim.Adagrad(self._model.parameters(), lr=0.1)
        config = dataclasses.replace(config, model=model, dense_interval_s=_DENSE_INTERVAL_S)
        self.streamer = RawEmbeddingStreamer(order.address, run=f"chaos-{model}", config=config)
        # Before the streamer's own hook: what a step computes is known before anything of it is on its way.
        self._optimizer.register_step_post_hook(self._report_outputs)
        self.streamer.attach(self._model, self._optimizer, publish="all", dense=True, dense_states=True)

    def step(self) -> None:
        self._optimizer.zero_grad()
        # Some rows are hot, and every row comes up now and then.
        ids = {
            name: torch.from_numpy((rows * self._random.random((8, 3)) ** 3).astype(np.int64))
            for name, rows in self._model.sizes.items()
        }
        (self._model(ids) - 1).pow(2).mean().backward()
        self._optimizer.step()

    @property
    def version(self) -> Version:
        """(epoch, step) of the last step."""
        assert self.streamer.stats().step == self._num_steps
        return self.streamer.epoch, self._num_steps

    def _report_outputs(self, *_: Any) -> None:
        self._num_steps += 1
        self._report("computed", self.name, (self.streamer.epoch, self._num_steps), outputs_of(self._model))

    async def dense_differences(self, reader: EmbeddingReader) -> list[str]:
        """Return a line for each dense tensor that is not the store's; after a flush there is none."""
        part = await reader.dense(self.name)
        if part.version != self.version:
            return [f"{self.name}: the dense part is of {part.version}, not of {self.version}"]
        values = self._model.state_dict()
        return [
            f"{self.name}:{path}: other values than the trainer's"
            for path in DENSE_SPECS
            if path not in part.tensors or part.tensors[path].tobytes() != bits_of(values[path]).tobytes()
        ]


class _Trainer:
    def __init__(self, order: TrainerOrder, report: Callable[..., None]) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(order.seed)
        self._report = report
        self._address = order.address
        config = StreamerConfig(
            policy=order.policy,
            spool_dir=order.spool_dir,
            staging_bytes=128 << 10,
            message_bytes=16 << 10,
            window_messages=16,
            retry_min_s=0.01,
            retry_max_s=0.2,
            request_timeout_s=10.0,
            connect_timeout_s=_WAIT_S,
            on_set_back="resend" if order.resends else "raise",
        )
        self._trainers = [_ModelTrainer(order, model, config, report) for model in MODELS]
        self._raw = RawWriter(order.address, config, order.seed)
        self._raw.publish()

    def run(self, commands: Connection) -> None:
        self._report("ready", self._trainers[0].streamer.epoch)
        while True:
            for trainer in self._trainers:
                trainer.step()
            self._raw.write()
            if not commands.poll(_STEP_PAUSE_S):
                continue
            assert commands.recv() == "flush"
            for trainer in self._trainers:
                trainer.streamer.flush(_WAIT_S)
            self._raw.flush(_WAIT_S)
            tables = [table for trainer in self._trainers for table in trainer.streamer.tables]
            comparison = compare_with_store(tables, self._address)
            differences = asyncio.run(self._dense_differences())
            text = "\n".join([str(comparison), *differences])
            versions = {trainer.name: trainer.version for trainer in self._trainers}
            self._report("flushed", comparison.is_equal and not differences, text, versions)
            assert commands.recv() == "go on"

    async def _dense_differences(self) -> list[str]:
        async with await EmbeddingReader.connect(self._address, timeout_s=_WAIT_S) as reader:
            return [line for trainer in self._trainers for line in await trainer.dense_differences(reader)]


class _RawFlush:
    """Stands for a `Flush`: one ready-made message a shard."""

    def __init__(self, messages: dict[int, Message], num_losses: int) -> None:
        self.messages_by_shard, self.num_losses = messages, num_losses
        self.num_left = len(messages)

    def messages(self, shard: int, max_bytes: int) -> Iterator[Message]:
        yield self.messages_by_shard[shard]


class RawWriter:
    """A client without a model, over the streamer's own channels: sets and deletes rows of `RAW_SPECS` at random."""

    def __init__(self, address: str, config: StreamerConfig, seed: int) -> None:
        """Open a session on all shards, in a thread of its own."""
        self._config = config
        self._random = np.random.default_rng(seed)
        self._step = 0
        self._changed = threading.Condition()
        self._outstanding = self._num_losses = 0
        self._lost: set[int] = set()  # shards that were set back, whose rows the next batch has
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._open(address), self._loop).result(_WAIT_S)

    def publish(self) -> None:
        """Write every row."""
        self._submit({fqn: (ids, ids[:0]) for fqn, ids in RAW_ROWS.items()})

    def write(self) -> None:
        """Write and delete a few rows, unless too much is on its way already."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._outstanding >= _MAX_OUTSTANDING:
                return
        rows = {}
        for fqn, ids in RAW_ROWS.items():
            some = self._random.choice(ids, 6, replace=False)
            num_set = int(self._random.integers(2, 6))
            rows[fqn] = (some[:num_set], some[num_set:])
        self._submit(rows)

    def flush(self, timeout_s: float) -> None:
        """Return when every shard has all, also one that was set back: it says so at the latest to a new batch."""
        while True:
            self._submit({fqn: (ids[:0], ids[:0]) for fqn, ids in RAW_ROWS.items()})
            with self._changed:
                is_done = self._changed.wait_for(lambda: not self._outstanding or self._error is not None, timeout_s)
                if self._error is not None:
                    raise self._error
                late = [channel.describe() for channel in self._channels if channel.num_behind]
                assert is_done, f"{self._outstanding} raw batches are not acked: {late}"
                if not self._lost:
                    return

    async def _open(self, address: str) -> None:
        config, rng = self._config, random.Random(0).random
        connect = partial(ParamServerClient.connect, timeout_s=config.connect_timeout_s)
        asks = Writer(run="raw", client="rank0", epoch=0, rank=0, world_size=1)
        rendezvous = Rendezvous(connect, timeout_s=config.connect_timeout_s, random=rng)
        store = await rendezvous.find_store(parse_addresses(address), asks)
        writer = asks.with_epoch(store.highest_epoch + 1)
        await rendezvous.open_session(store.shards, writer, RAW_SPECS)
        self._channels = [
            ShardChannel(
                shard,
                writer=writer,
                config=config,
                connect=connect,
                random=rng,
                on_durable=self._on_durable,
                on_loss=self._on_loss,
                resolver=rendezvous.resolver,
            )
            for shard in store.shards
        ]
        for channel in self._channels:
            channel.add_tables(list(RAW_SPECS))
            task = asyncio.create_task(channel.run())
            task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        with self._changed:
            self._error = task.exception()
            self._changed.notify_all()

    def _on_loss(self, shard: int | None) -> int:
        assert shard is not None, "no server is replaced by another one"
        with self._changed:
            self._lost.add(shard)
            self._num_losses += 1
            return self._num_losses

    def _on_durable(self, flush: Any) -> None:
        with self._changed:
            flush.num_left -= 1
            self._outstanding -= not flush.num_left
            self._changed.notify_all()

    def _submit(self, rows: dict[str, tuple[Any, Any]]) -> None:
        self._step += 1
        time_us = time.time_ns() // 1000
        num_shards = len(self._channels)
        with self._changed:
            self._outstanding += 1
            lost, self._lost, num_losses = self._lost, set(), self._num_losses
        messages = {shard: Message(self._step, time_us, True, True, [], 0) for shard in range(num_shards)}
        for spec in RAW_SPECS:
            values, deleted = rows[spec.fqn]
            for shard, message in messages.items():
                ids = (RAW_ROWS[spec.fqn], deleted[:0]) if shard in lost else (values, deleted)
                mine, gone = (each[shards_of_rows(table_seed(spec.fqn), each, num_shards) == shard] for each in ids)
                message.deltas += self._deltas(spec, mine, gone)
        for message in messages.values():
            message.size_bytes = 1024 + sum(len(delta.row_ids) * 10 for delta in message.deltas)
        flush: Any = _RawFlush(messages, num_losses)
        self._loop.call_soon_threadsafe(lambda: [channel.enqueue(flush) for channel in self._channels])

    def _deltas(self, spec: TableSpec, row_ids: Any, deleted: Any) -> list[Any]:
        """Return the deltas of a table: one, or two column shards of one that is split."""
        half = spec.dim // 2
        parts = [(0, half), (half, half)] if spec.fqn == "raw.split" else [(0, spec.dim)]
        return [self._delta(spec, offset, width, row_ids, deleted) for offset, width in parts]

    def _delta(self, spec: TableSpec, offset: int, width: int, row_ids: Any, deleted: Any) -> Any:
        def column(dtype: DType, columns: int) -> bytes:
            return self._random.standard_normal((row_ids.size, columns)).astype(dtype.numpy).tobytes()

        return idl.TableDelta(
            fqn=spec.fqn,
            fingerprint=spec.fingerprint,
            column_offset=offset,
            width=width,
            row_ids=row_ids.tobytes(),
            weights=column(spec.dtype, width),
            states=[
                idl.StateColumn(
                    name=state.name,
                    dtype=int(state.dtype),
                    width=state.width or width,
                    data=column(state.dtype, state.width or width),
                )
                for state in spec.states
            ],
            identities=self._random.integers(0, 2**62, row_ids.size).tobytes() if spec.has_identities else None,
            deleted_row_ids=deleted.tobytes(),
        )
