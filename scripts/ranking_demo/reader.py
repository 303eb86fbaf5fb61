"""The demo's reader: another process, which serves from a replica and never sees the trainer's memory.

It scores each batch of events before the trainer trains on it, notes when each step becomes visible, and in the end
saves the rows that it serves. No order to it carries rows, weights or gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.paramserver.replica import EmbeddingReplica
from headrace.scripts.benches.child import Worker
from headrace.scripts.benches.observer import Observer
from headrace.scripts.ranking_demo.events import TABLES, EventLog, Replay, is_hit

__all__ = ["Scorer", "read"]

_Ids = npt.NDArray[np.int64]
_Rows = npt.NDArray[Any]


class Scorer:
    """Scores batches with the rows that the replica serves, and with a copy frozen at the start of each part."""

    def __init__(self, source: EmbeddingReplica, replay: Replay) -> None:
        """Begin without a frozen copy; batch 0 makes one."""
        self._source, self._replay = source, replay
        self._frozen: tuple[_Rows, _Rows] = (np.zeros((0, 0)), np.zeros((0, 0)))

    def score(self, batch: int) -> dict[str, int]:
        """Return the hits of the `streamed` and the `frozen` copy, and the `missing` rows, which score as zeros."""
        if batch in self._replay.part_starts:
            self._frozen = self._look_up_all()
        users = self._replay.log.users[self._replay.events_of(batch)]
        candidates = self._replay.candidates(batch)
        user_ids, user_at = np.unique(users, return_inverse=True)
        item_ids, item_at = np.unique(candidates, return_inverse=True)
        num_missing = sum(self._source.num_missing.values())
        user_rows, item_rows = self._look_up(user_ids, item_ids)
        streamed = is_hit(user_rows[user_at], item_rows[item_at.reshape(candidates.shape)])
        frozen = is_hit(self._frozen[0][users], self._frozen[1][candidates])
        missing = sum(self._source.num_missing.values()) - num_missing
        return {"streamed": int(streamed.sum()), "frozen": int(frozen.sum()), "missing": missing}

    def save(self, path: Path) -> None:
        """Write all rows as they are served now to a file in numpy's `.npz` format: an array a table, by fqn."""
        rows: dict[str, Any] = dict(zip(TABLES, self._look_up_all(), strict=True))
        np.savez(path, **rows)

    def _look_up_all(self) -> tuple[_Rows, _Rows]:
        log = self._replay.log
        return self._look_up(np.arange(log.user_ids.size), np.arange(log.item_ids.size))

    def _look_up(self, user_ids: _Ids, item_ids: _Ids) -> tuple[_Rows, _Rows]:
        rows = self._source.lookup_many(dict(zip(TABLES, (user_ids, item_ids), strict=True)))
        return rows[TABLES[0]].numpy(), rows[TABLES[1]].numpy()


def read(address: str, log_path: str, batch_events: int, seed: int) -> Worker:
    """Follow the server at an address; an order is a `batch` to score, or the last `step` and a `path` to save to."""
    torch.set_num_threads(1)  # for tables this small a second thread costs more than it helps
    replay = Replay(log=EventLog(**np.load(log_path)), batch_events=batch_events, seed=seed)
    with EmbeddingReplica(address) as replica, Observer(replica) as observer:
        scorer = Scorer(replica, replay)
        answer: dict[str, Any] = {}
        while True:
            order = yield answer
            if "batch" in order:
                answer = scorer.score(order["batch"])
            else:
                answer = {"seen": observer.wait_for(order["step"])}
                scorer.save(Path(order["path"]))
