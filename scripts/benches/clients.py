"""A trainer and a replica that work all the time while a bench does something to their server, and tell how it was."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from headrace.schemas.errors import HeadraceError, UnavailableError
from headrace.scripts.benches.child import Child, Worker

__all__ = ["CALM_S", "MODEL", "paced_trainer", "steady_replica"]

CALM_S = 1.0
"""What is said of the time before something happened is said of so many seconds."""
MODEL = "bench"
_STEP_S, _WATCH_INTERVAL_S, _LOOKUP_INTERVAL_S = 0.02, 0.001, 0.002
_NUM_BATCHES, _NUM_LOOKED_UP = 64, 200
_TIMEOUT_S = 120.0


def paced_trainer(address: str, *, num_rows: int, dim: int, rows_per_s: int, step_s: float = _STEP_S) -> Child:
    """Start a trainer of one table that begins a step each `step_s` seconds, and streams it.

    An order says when something `began_s`, and since when it is over for `sure_s`, monotonic. The answer comes with the
    first ack of a step that began later: `acked_s`; `longest_s` without an ack since it began; and, of this time and
    of the calm before, the seconds of each step, those in which it did not wait for a core, and rows acked a second.
    """
    settings: dict[str, Any] = {"num_rows": num_rows, "dim": dim, "step_s": step_s}
    settings["rows_per_step"] = max(1, round(rows_per_s * step_s))
    return Child(f"{__name__}:_train", "the bench's trainer", address=address, **settings)


def steady_replica(address: str, *, num_rows: int) -> Child:
    """Start a replica of the trainer's table that looks rows up all the time.

    An order says when something `began_s` and `ended_s`. The answer has the seconds of the lookups meanwhile and in the
    calm before, and how many there were since the last order, and how many failed.
    """
    return Child(f"{__name__}:_look_up", "the bench's replica", address=address, num_rows=num_rows)


def _train(address: str, num_rows: int, dim: int, rows_per_step: int, step_s: float) -> Worker:
    import torch
    from torch import nn

    from headrace.streamer import RawEmbeddingStreamer, StreamerConfig

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    draws = (rng.choice(num_rows, rows_per_step, replace=False) for _ in range(_NUM_BATCHES))
    batches = [torch.from_numpy(ids[:, None]) for ids in draws]
    rows = nn.EmbeddingBag(num_rows, dim, mode="sum", sparse=True)
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.01)
    config = StreamerConfig(model=MODEL, freshness_s=0, max_cost_percent=100)  # each step is sent at once
    streamer = RawEmbeddingStreamer(address, run="bench", config=config)
    streamer.attach(rows, optimizer, publish="all")
    streamer.flush()
    steps: list[tuple[int, float, float, float]] = []  # number, begin, end, seconds in the queue for a core
    acks: list[tuple[float, int, int]] = []  # when, step, rows so far
    failures: list[BaseException] = []

    def train() -> None:
        try:
            while True:
                begin_s, queued_s = time.monotonic(), _queued_s()
                optimizer.zero_grad()
                torch.autograd.backward(rows(batches[len(steps) % len(batches)]).pow(2).mean())
                optimizer.step()
                steps.append((streamer.stats().step, begin_s, time.monotonic(), _queued_s() - queued_s))
                time.sleep(max(0.0, begin_s + step_s - time.monotonic()))
        except BaseException as exc:
            failures.append(exc)

    def watch() -> None:
        while True:
            stats = streamer.stats()
            if not acks or stats.acked_step > acks[-1][1]:
                acks.append((time.monotonic(), stats.acked_step, stats.num_rows_sent))
            time.sleep(_WATCH_INTERVAL_S)

    for run in (train, watch):
        threading.Thread(target=run, daemon=True).start()
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        began_s, deadline_s = order["began_s"], time.monotonic() + _TIMEOUT_S
        while (acked_s := _first_ack(steps, acks, order["sure_s"])) is None:
            if failures:
                raise HeadraceError(f"a step has failed: {failures[0]!r}")
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"nothing has been acked for {_TIMEOUT_S:g} s: {streamer.stats().last_error}")
            time.sleep(_WATCH_INTERVAL_S)
        acked = [began_s, *(at for at, *_ in acks if began_s < at <= acked_s)]
        calm_s = began_s - CALM_S
        answer = {
            "acked_s": acked_s,
            "longest_s": float(np.diff(acked).max()),
            **_spans("step_during", steps, began_s, acked_s),
            **_spans("step_calm", steps, calm_s, began_s),
            "rows_per_s_during": _rows_per_s(acks, began_s, acked_s),
            "rows_per_s_calm": _rows_per_s(acks, calm_s, began_s),
        }
        del steps[:-1000], acks[:-1000]


def _queued_s() -> float:
    """Return for how long the calling thread has been ready to run while others had the cores."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def _spans(
    name: str, steps: list[tuple[int, float, float, float]], first_s: float, last_s: float
) -> dict[str, list[float]]:
    """Return the seconds of each step between two moments, and those in which it did not wait for a core."""
    found = [(end - begin, queued) for _, begin, end, queued in steps if first_s <= begin and end <= last_s]
    return {
        f"{name}_s": [took for took, _ in found],
        f"{name}_unqueued_s": [took - queued for took, queued in found],
    }


def _first_ack(
    steps: list[tuple[int, float, float, float]], acks: list[tuple[float, int, int]], began_s: float
) -> float | None:
    """Return when the first step that began after a moment was acked; None before."""
    first = next((number for number, begin, *_ in list(steps) if begin >= began_s), None)
    return None if first is None else next((at for at, acked, _ in list(acks) if acked >= first), None)


def _rows_per_s(acks: list[tuple[float, int, int]], first_s: float, last_s: float) -> float:
    """Return the rows a second that were acked between two moments."""
    moments = [at for at, *_ in acks]
    first, last = (acks[max(bisect_right(moments, at) - 1, 0)][2] for at in (first_s, last_s))
    return (last - first) / (last_s - first_s)


def _look_up(address: str, num_rows: int) -> Worker:
    from headrace.paramserver.replica import EmbeddingReplica

    replica = EmbeddingReplica(address, model=MODEL)
    row_ids = np.linspace(0, num_rows - 1, min(num_rows, _NUM_LOOKED_UP)).astype(np.int64)
    lookups: list[tuple[float, float, bool]] = []  # begin, end, whether it failed

    def look_up() -> None:
        while True:
            is_failed, begin_s = False, time.monotonic()
            try:
                replica.lookup("weight", row_ids)
            except Exception:  # of whatever kind: no lookup may fail
                is_failed = True
            lookups.append((begin_s, time.monotonic(), is_failed))
            time.sleep(_LOOKUP_INTERVAL_S)

    threading.Thread(target=look_up, daemon=True).start()
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        began_s, ended_s = order["began_s"], order["ended_s"]
        seen = lookups[:]
        del lookups[: len(seen)]
        answer = {
            "num_lookups": len(seen),
            "num_failed": sum(is_failed for *_, is_failed in seen),
            "lookup_during_s": [end - begin for begin, end, _ in seen if began_s <= begin < ended_s],
            "lookup_calm_s": [end - begin for begin, end, _ in seen if began_s - CALM_S <= begin < began_s],
        }
