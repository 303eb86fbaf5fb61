"""The demo's job: a server, a trainer that streams to it, a reader with a replica of it, and the comparison at the end.

For each batch of events, in time order: the reader scores it with what its replica holds at that moment, the trainer's
own tables score it too, and then the trainer trains on it. The trainer never waits for its updates to arrive, only for
the reader's answer, so the streamed copy is as old as it is in truth.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.scripts.demo_model import ITEM_FQN, USER_FQN, DemoModel, ModelConfig, process_group
from headrace.scripts.demo_ranking import Replay, is_hit
from headrace.scripts.demo_reader import ReaderConfig
from headrace.scripts.demo_reader_process import ReaderProcess
from headrace.scripts.demo_report import DemoReport, HitLog, Lag
from headrace.scripts.one_torch_thread import one_torch_thread
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.compare import compare_with_store

__all__ = ["run"]

OnStage = Callable[[str], None]
OnBatch = Callable[[HitLog, int], None]


@dataclass(frozen=True, slots=True)
class _System:
    """All that runs during the demo; `address` is the server's, `folder` is for files of this run."""

    folder: Path
    address: str
    model: DemoModel
    streamer: RawEmbeddingStreamer
    reader: ReaderProcess


def run(replay: Replay, *, num_shards: int, on_stage: OnStage, on_batch: OnBatch) -> tuple[HitLog, DemoReport]:
    """Run the demo once; its processes and files are gone when this returns or raises.

    Args:
        replay: What to train on, in which batches.
        num_shards: Shards of the server, ≥ 1.
        on_stage: Told in a few words what begins.
        on_batch: Told after each batch: the hits so far, and the events trained on.

    Returns:
        (hits of each copy, what was found).

    Raises:
        HeadraceError: The server, the streamer or the reader has failed.
    """
    started_s = time.monotonic()
    with _running_system(replay, num_shards, on_stage) as system:
        num_published = system.streamer.stats().num_rows_sent
        on_stage("training, streaming and serving")
        training_s = time.monotonic()
        hits, num_missing = _train(replay, system, on_batch)
        system.streamer.flush()
        streaming_s = time.monotonic() - training_s
        stats = system.streamer.stats()
        on_stage("comparing every row of trainer, server and replica")
        lags_s = system.reader.finish()
        comparison = compare_with_store(system.streamer.tables, system.address)
        num_served_differently = _compare_with_replica(system)
    assert stats.lag_p50_s is not None and stats.lag_p99_s is not None  # there was a flush
    return hits, DemoReport(
        num_events=replay.log.num_events,
        num_users=replay.log.num_users,
        num_items=replay.log.num_items,
        num_batches=replay.num_batches,
        num_shards=num_shards,
        seed=replay.seed,
        num_rows_compared=sum(table.num_rows for table in comparison.tables),
        num_rows_different=comparison.num_different + comparison.num_missing,
        num_replica_rows_different=num_served_differently,
        num_rows_streamed=stats.num_rows_sent - num_published,
        streaming_s=streaming_s,
        ack_lag=Lag(p50_ms=stats.lag_p50_s * 1000, p99_ms=stats.lag_p99_s * 1000, count=stats.num_flushes),
        arrival_lag=Lag.of(lags_s),
        num_missing_rows=num_missing,
        hit_rate=hits.rates(),
        hit_rate_whole_log=hits.rates(first_part=0),
        duration_s=time.monotonic() - started_s,
    )


@contextmanager
def _running_system(replay: Replay, num_shards: int, on_stage: OnStage) -> Iterator[_System]:
    log = replay.log
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-")))
        stack.enter_context(one_torch_thread())  # with tables this small a second one costs more than it helps
        on_stage(f"starting a parameter server of {num_shards} shard{'s' * (num_shards > 1)}")
        server = stack.enter_context(ServerProcess.start(folder / "server", shards=num_shards))
        on_stage("publishing the untrained tables")
        stack.enter_context(process_group())
        model = DemoModel(ModelConfig(num_users=log.num_users, num_items=log.num_items, seed=replay.seed))
        # A configuration of its own: one in the environment is meant for another server. The demo shows how fresh rows
        # can be, whatever that costs the trainer.
        config = StreamerConfig(flush_percent=100)
        streamer = stack.enter_context(RawEmbeddingStreamer(server.address, run="demo", config=config))
        streamer.attach(model.dmp, publish="all")
        # The one flush before the end: a server that is new to a model has to be given its tables once.
        streamer.flush()
        log.save(folder / "log.npz")
        reader_config = ReaderConfig(
            address=server.address,
            log_path=str(folder / "log.npz"),
            batch_events=replay.batch_events,
            seed=replay.seed,
            user_fqn=USER_FQN,
            item_fqn=ITEM_FQN,
        )
        reader = stack.enter_context(ReaderProcess(reader_config))
        yield _System(folder, server.address, model, streamer, reader)


def _train(replay: Replay, system: _System, on_batch: OnBatch) -> tuple[HitLog, int]:
    """Score and train on all batches; return the hits, and how many rows the reader missed."""
    log, tables, hits, num_missing = replay.log, system.model.tables, HitLog(replay), 0
    for batch in range(replay.num_batches):
        events = replay.events_of(batch)
        users = log.users[events]
        score = system.reader.score(batch)
        is_live_hit = is_hit(tables[USER_FQN][users], tables[ITEM_FQN][replay.candidates(batch)])
        hits.add(live=int(is_live_hit.sum()), streamed=score.num_streamed_hits, frozen=score.num_frozen_hits)
        num_missing += score.num_missing_rows
        system.model.train(batch, users, log.items[events], replay.num_items_seen[events])
        trained_at_s = time.monotonic()
        # Says now that the step is over, which the streamer would else see when the next one begins.
        system.streamer.step()
        system.reader.watch(system.streamer.stats().step, trained_at_s)
        on_batch(hits, events.stop)
    return hits, num_missing


def _compare_with_replica(system: _System) -> int:
    """Return how many rows the replica serves with other bits than the trainer's."""
    path = system.folder / "served.npz"
    system.reader.save(path)
    num_different = 0
    with np.load(path, allow_pickle=False) as served:
        for fqn, rows in system.model.tables.items():
            mine, theirs = np.ascontiguousarray(rows).view(np.int32), served[fqn].view(np.int32)
            assert mine.shape == theirs.shape, "the replica has rows of another shape"
            num_different += int((mine != theirs).any(axis=1).sum())
    return num_different
