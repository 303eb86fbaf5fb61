"""The events of the demo: a sample of a public project's history, and its replay in batches."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NUM_PARTS", "NUM_RIVALS", "SAMPLE", "TABLES", "TOP", "Replay", "is_hit"]

SAMPLE = Path(__file__).with_name("sample_interactions.csv.gz")
TABLES = ("ebc.embedding_bags.user.weight", "ebc.embedding_bags.item.weight")  # fqns of users and items
TOP, NUM_RIVALS = 10, 99  # a hit: fewer than TOP of NUM_RIVALS random items score as high as the event's own item
NUM_PARTS = 10  # of the log; a frozen copy is as old as the start of its part
_BATCH_EVENTS = 32

_Ids = npt.NDArray[np.int64]


class Replay:
    """The log as a sequence of batches, each of which is ranked and then trained on.

    Trainer and reader derive all of it from the sample, so nothing of it is sent. Users and items are numbered in the
    order in which they appear: the items seen up to some event are the rows from 0 to the largest item up to there.

    Attributes:
        users, items: int64[num_events], rows of each event's user and item, in time order.
        num_items_seen: int64[num_events], how many items have appeared up to and with each event.
        part_starts: The first batch of each of the log's NUM_PARTS parts, ascending, 0 first.
    """

    def __init__(self, max_events: int | None = None) -> None:
        """Read the sample; keep only the earliest `max_events`."""
        with gzip.open(SAMPLE, "rt") as file:
            events = np.loadtxt(file, np.int64, delimiter=",", skiprows=1)  # timestamp, user, item
        events = events[np.argsort(events[:, 0], kind="stable")][:max_events]
        self.users, self.num_users = _number_by_appearance(events[:, 1])
        self.items, self.num_items = _number_by_appearance(events[:, 2])
        self.num_items_seen = np.maximum.accumulate(self.items) + 1
        self.num_batches = -(-self.users.size // _BATCH_EVENTS)
        self.part_starts = tuple(part * self.num_batches // NUM_PARTS for part in range(NUM_PARTS))

    def events_of(self, batch: int) -> slice:
        """Return where a batch's events lie in the log."""
        first = batch * _BATCH_EVENTS
        return slice(first, min(first + _BATCH_EVENTS, self.users.size))

    def candidates(self, batch: int, num_random: int = NUM_RIVALS, stream: int = 0) -> _Ids:
        """Return int64[b, 1 + num_random]: each event's own item, then random other ones, drawn with replacement.

        Only items that have appeared up to the event are drawn: nothing has been learned of later ones. An event
        before which no other item has appeared is paired with its own. Each `stream` has other random items.
        """
        events, rng = self.events_of(batch), np.random.default_rng((stream, batch))
        items, num_others = self.items[events, None], self.num_items_seen[events, None] - 1
        drawn = np.floor(rng.random((items.size, num_random)) * num_others).astype(np.int64)
        drawn += (drawn >= items) & (num_others > 0)  # skips the event's own item
        return np.concatenate([items, drawn], axis=1)


def _number_by_appearance(ids: _Ids) -> tuple[_Ids, int]:
    """Return the row of each id, with rows numbered in the order in which ids first appear, and their number."""
    values, first_at, inverse = np.unique(ids, return_index=True, return_inverse=True)
    row_of_value = np.empty(values.size, np.int64)
    row_of_value[np.argsort(first_at)] = np.arange(values.size)
    return row_of_value[inverse], values.size


def is_hit(scores: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return bool[b], whether each event ranks its own item, the first of each row, among the top TOP.

    Ties and NaN count against the event, so scores that are all alike, as those of missing rows are, make no hit.
    """
    return np.asarray((~(scores[:, 1:] < scores[:, :1])).sum(axis=1) < TOP)
