"""The demo's job: a server, a trainer that streams to it, a reader with a replica of it, and the comparison at the end.

For each batch of events, in time order: the reader scores it with what its replica holds at that moment, the trainer's
own tables score it too, and then the trainer trains on it. The trainer never waits for its updates to arrive, only for
the reader's answer, so the streamed copy is as old as it really is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.benches.child import Child
from headrace.scripts.benches.harness import OnStage, one_torch_thread
from headrace.scripts.benches.observer import delays_of
from headrace.scripts.ranking_demo.events import TABLES, Replay, is_hit
from headrace.scripts.ranking_demo.model import DemoModel, process_group
from headrace.scripts.ranking_demo.summary import DemoReport, HitLog
from headrace.streamer import RawEmbeddingStreamer, StreamerConfig
from headrace.streamer.compare import compare_with_store

__all__ = ["run"]

_ANSWER_TIMEOUT_S = 90.0  # longer than any deadline in the reader, whose own error says more


def run(
    replay: Replay, *, num_shards: int, on_stage: OnStage, on_batch: Callable[[HitLog, int], None]
) -> tuple[HitLog, DemoReport]:
    """Run the demo once; return the hits of each copy, and what was found. Its processes and files are gone then.

    `on_batch` is called after each batch with the hits so far, and the number of events trained on.
    """
    started_s, log, hits = time.monotonic(), replay.log, HitLog(replay)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-")))
        stack.enter_context(one_torch_thread())  # for tables this small a second thread costs more than it helps
        on_stage(f"starting a parameter server of {num_shards} shard{'s' * (num_shards > 1)}")
        server = stack.enter_context(ServerProcess.start(folder / "server", shards=num_shards))
        on_stage("publishing the untrained tables")
        stack.enter_context(process_group())
        model = DemoModel(num_users=log.user_ids.size, num_items=log.item_ids.size, seed=replay.seed)
        # Without the environment's settings, which are for another server. Rows are as fresh as they can be.
        config = StreamerConfig(flush_percent=100)
        streamer = stack.enter_context(RawEmbeddingStreamer(server.address, run="demo", config=config))
        streamer.attach(model.dmp, publish="all")
        streamer.flush()  # a server that does not know a model needs its tables once; no further flush before the end
        np.savez(folder / "log.npz", **asdict(log))
        order: dict[str, Any] = {"address": server.address, "log_path": str(folder / "log.npz")}
        order |= {"batch_events": replay.batch_events, "seed": replay.seed}
        reader = stack.enter_context(Child("headrace.scripts.ranking_demo.reader:read", "the demo's reader", **order))
        num_published = streamer.stats().num_rows_sent
        on_stage("training, streaming and serving")
        training_s, num_missing = time.monotonic(), 0
        steps, trained_ns = list[int](), list[int]()
        for batch in range(replay.num_batches):
            events = replay.events_of(batch)
            users, items = log.users[events], log.items[events]
            score = reader.ask(batch=batch, timeout_s=_ANSWER_TIMEOUT_S)
            user_rows, item_rows = (model.tables[fqn] for fqn in TABLES)
            live = is_hit(user_rows[users], item_rows[replay.candidates(batch)])
            hits.add(live=int(live.sum()), **score)
            num_missing += score["missing"]
            model.train(batch, users, items, replay.num_items_seen[events])
            trained_ns.append(time.monotonic_ns())
            streamer.step()  # ends the step now; otherwise it would end when the next one begins
            steps.append(streamer.stats().step)
            on_batch(hits, events.stop)
        streamer.flush()
        streaming_s = time.monotonic() - training_s
        stats = streamer.stats()
        on_stage("comparing every row of trainer, server and replica")
        seen = reader.ask(step=steps[-1], path=str(folder / "served.npz"), timeout_s=_ANSWER_TIMEOUT_S)["seen"]
        comparison = compare_with_store(streamer.tables, server.address)
        served = np.load(folder / "served.npz")
        is_different = [(rows.view("i4") != served[fqn].view("i4")).any(axis=1) for fqn, rows in model.tables.items()]
    lags_ms = delays_of(steps, trained_ns, seen)
    p50_ms, p99_ms = np.percentile(lags_ms, [50, 99]).tolist()
    assert stats.lag_p50_s is not None and stats.lag_p99_s is not None  # there was a flush
    return hits, DemoReport(
        num_events=log.users.size,
        num_users=log.user_ids.size,
        num_items=log.item_ids.size,
        num_batches=replay.num_batches,
        num_shards=num_shards,
        seed=replay.seed,
        num_rows_compared=sum(table.num_rows for table in comparison.tables),
        num_rows_different=comparison.num_different + comparison.num_missing,
        num_replica_rows_different=sum(int(of_table.sum()) for of_table in is_different),
        num_rows_streamed=stats.num_rows_sent - num_published,
        streaming_s=streaming_s,
        ack_lag={"p50_ms": stats.lag_p50_s * 1e3, "p99_ms": stats.lag_p99_s * 1e3, "count": stats.num_flushes},
        arrival_lag={"p50_ms": p50_ms, "p99_ms": p99_ms, "count": len(lags_ms)},
        num_missing_rows=num_missing,
        hit_rate=hits.rates(),
        hit_rate_whole_log=hits.rates(first_part=0),
        duration_s=time.monotonic() - started_s,
    )
