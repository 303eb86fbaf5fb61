"""The trainer of the chaos harness: a process of its own that trains, streams, and reports what it was acked.

It trains two small torch models of several sparse tables and a dense tower; the tensors of both have the same paths.
One table of each is stored rounded, that of the second without optimizer states.
Beside their streamers runs a raw writer, whose tables have what no tap gives yet: deletes, identities, virtual row ids,
and rows split by columns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from chaos_ledger import UNKNOWN_SEQ, acked_deltas
from chaos_model import DENSE_SPECS, GROWING, MAX_ROWS, MODELS, TORCH_TABLES, Ranker, attach, outputs_of
from chaos_model import DIMS as TORCH_DIMS

from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.address import parse_addresses
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec
from headrace.schemas.version import Version
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.channel import ShardChannel
from headrace.streamer.delivery.rendezvous import Writer
from headrace.streamer.delivery.sender import Sender
from headrace.streamer.flush.layout import Column, Flush, FlushedDeletions, FlushedTable, StepMark, TableFormat
from headrace.streamer.flush.staging import ALIGNMENT_BYTES, StagingPool

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
    **TORCH_DIMS,
    **{f"{model}:{path}": spec.dim for model in MODELS for path, spec in DENSE_SPECS.items()},
    **{spec.fqn: spec.dim for spec in RAW_SPECS},
}

_Ids = npt.NDArray[np.int64]

_WAIT_S = 60.0
_MAX_OUTSTANDING = 32
_STEP_PAUSE_S = 0.004
_DENSE_INTERVAL_S = 0.05
_MAX_STALENESS_S = 2.5  # some flushes hold rows back before a release


@dataclass(frozen=True, kw_only=True)
class TrainerOrder:
    """What a trainer is told when it starts: where the server is, its seed, and a policy.

    `num_grown` rows were added to the growing table of both models. It `resends` what a shard has lost, or ends.
    """

    address: str
    seed: int
    policy: str
    num_grown: int = 0
    resends: bool = False


def run_trainer(order: TrainerOrder, pipe: Connection) -> None:
    """Train until killed.

    Takes `flush`, and then `go on`. Reports `("ready",)`, `("acked", deltas, shard, seq)`, `("failed", why)`,
    `("computed", model, version, outputs)` and `("flushed", is_equal, audits, versions)`.
    """
    lock = threading.Lock()

    def report(*what: Any) -> None:
        with lock:
            pipe.send(what)

    logging.disable(logging.WARNING)  # of lost connections there will be many
    warnings.simplefilter("ignore")  # torch's, about its own sparse tensors
    try:
        _report_acks(report)
        _Trainer(order, report).run(pipe)
    except (Exception, KeyboardInterrupt):
        report("failed", traceback.format_exc())


def _report_acks(report: Callable[..., None]) -> None:
    """Report each batch in the moment in which its ack is known, and before anything follows from that."""
    ack_first = ShardChannel._ack_first

    def ack_and_report(self: Any) -> None:
        batch = self._unacked[0]
        # Acks come out of order, and a later one's place is an upper bound.
        seq = self.place[1] if self.place[0] >= batch.client_seq else UNKNOWN_SEQ
        deltas = acked_deltas(self._writer.epoch, batch.message.step, batch.message.deltas)
        report("acked", deltas, self.shard.shard, seq)
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
        config = dataclasses.replace(
            config,
            model=model,
            dense_interval_s=_DENSE_INTERVAL_S,
            max_staleness_s=_MAX_STALENESS_S,
        )
        self.streamer = RawEmbeddingStreamer(order.address, run=f"chaos-{model}", config=config)
        # Before the streamer's own hook: what a step computes is known before anything of it is on its way.
        self._optimizer.register_step_post_hook(self._report_outputs)
        attach(self.streamer, self._model, model, self._optimizer)

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
        self._report("computed", self.name, (self.streamer.epoch, self._num_steps), outputs_of(self._model, self.name))

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
        self._report("ready")
        while True:
            for trainer in self._trainers:
                trainer.step()
            self._raw.write()
            if not commands.poll(_STEP_PAUSE_S):
                continue
            assert commands.recv() == "flush"
            self._raw.flush(_WAIT_S)
            audits = [trainer.streamer.audit(timeout_s=_WAIT_S) for trainer in self._trainers]
            differences = asyncio.run(self._dense_differences())
            is_equal = all(audit.is_equal for audit in audits) and not differences
            versions = {trainer.name: trainer.version for trainer in self._trainers}
            self._report("flushed", is_equal, "\n".join([*map(str, audits), *differences]), versions)
            assert commands.recv() == "go on"

    async def _dense_differences(self) -> list[str]:
        async with await EmbeddingReader.connect(self._address, timeout_s=_WAIT_S) as reader:
            return [line for trainer in self._trainers for line in await trainer.dense_differences(reader)]


class RawWriter:
    """A client without a model, over the streamer's own sender: sets and deletes rows of `RAW_SPECS` at random."""

    def __init__(self, address: str, config: StreamerConfig, seed: int) -> None:
        """Open a session on all shards."""
        self._random = np.random.default_rng(seed)
        self._step = self._num_losses = 0
        # Its flushes have memory of their own, so there is nothing to stage.
        config = dataclasses.replace(config, policy="coalesce")
        self._sender = Sender(config=config, pool=StagingPool(ALIGNMENT_BYTES))
        self._sender.start()
        asks = Writer(run="raw", client="rank0", epoch=0, rank=0, world_size=1)
        store = self._sender.find_store(parse_addresses(address), asks)
        self._sender.open(store, self._sender.acquire_epoch(store, asks))
        self._sender.register(list(RAW_SPECS))

    def publish(self) -> None:
        """Write every row."""
        self._submit({fqn: (ids, ids[:0]) for fqn, ids in RAW_ROWS.items()})

    def write(self) -> None:
        """Write and delete a few rows, unless too much is on its way already."""
        if self._sender.error is None and self._sender.stats().num_inflight_flushes >= _MAX_OUTSTANDING:
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
            self._sender.wait_durable(timeout_s)
            if self._num_losses == len(self._sender.losses):
                return

    def _submit(self, rows: dict[str, tuple[_Ids, _Ids]]) -> None:
        self._step += 1
        losses = self._sender.losses[self._num_losses :]
        self._num_losses += len(losses)
        shards = {shard for shard in losses if shard is not None}
        assert len(shards) == len(set(losses)), "no server is replaced by another one"
        tables = list[FlushedTable | FlushedDeletions]()
        for spec in RAW_SPECS:
            values, deleted = rows[spec.fqn]
            if shards:
                again = RAW_ROWS[spec.fqn]
                again = again[np.isin(shards_of_rows(spec.seed, again, len(self._sender.server_ids)), list(shards))]
                values, deleted = np.union1d(values, again), np.setdiff1d(deleted, again)
            tables += self._tables(spec, values, deleted)
        time_us = time.time_ns() // 1000
        self._sender.submit(
            Flush(
                step=self._step,
                time_us=time_us,
                tables=tables,
                mark=StepMark(self._step, time_us, is_exact_cut=True),
                dirty_since_s=time.monotonic(),
                oldest_us=time_us,
                num_rows=sum(table.bounds[-1] for table in tables),
                size_bytes=sum(table.bounds[-1] * table.row_bytes for table in tables),
                staging=None,
                num_losses=self._num_losses,
            )
        )

    def _tables(self, spec: TableSpec, row_ids: _Ids, deleted: _Ids) -> list[FlushedTable | FlushedDeletions]:
        """Return what is set and deleted of a table, of one that is split for each of its column shards."""
        half = spec.dim // 2
        parts = [(0, half), (half, half)] if spec.fqn == "raw.split" else [(0, spec.dim)]
        row_ids, bounds = _by_shard(spec, row_ids, len(self._sender.server_ids))
        deleted, deleted_bounds = _by_shard(spec, deleted, len(self._sender.server_ids))
        found: list[FlushedTable | FlushedDeletions] = []
        for offset, width in parts:
            layout = TableFormat(spec, ColumnShard(offset=offset, width=width))
            found.append(
                FlushedTable(
                    format=layout,
                    bounds=bounds,
                    row_ids=_column(row_ids),
                    weights=self._values(spec.dtype, row_ids.size, width),
                    states=tuple(self._values(state.dtype, row_ids.size, columns) for state, columns in layout.states),
                    identities=_column(self._random.integers(0, 2**62, row_ids.size)) if spec.has_identities else None,
                )
            )
            found.append(FlushedDeletions(layout, deleted_bounds, _column(deleted)))
        return found

    def _values(self, dtype: DType, num_rows: int, width: int) -> Column:
        return _column(self._random.standard_normal((num_rows, width)).astype(dtype.numpy))


def _by_shard(spec: TableSpec, row_ids: _Ids, num_shards: int) -> tuple[_Ids, list[int]]:
    """Return rows ordered by shard, and where each shard's begin."""
    shards = shards_of_rows(spec.seed, row_ids, num_shards)
    order = np.argsort(shards, kind="stable")
    return row_ids[order], np.searchsorted(shards[order], np.arange(num_shards + 1)).tolist()


def _column(values: npt.NDArray[Any]) -> Column:
    row_bytes = values.itemsize * (values.shape[1] if values.ndim > 1 else 1)
    return Column(memoryview(values.tobytes()), row_bytes)
