"""What is ranked, against what, and what counts as a hit: the same in the trainer and in the reader.

Both processes derive the batches, the random items and the moments of freezing from the log and a seed, so nothing
about them travels between the two. No torch here: the reader does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ConfigError
from headrace.scripts.demo_data import EventLog

__all__ = ["NUM_PARTS", "NUM_RIVALS", "TOP", "Replay", "is_hit", "pair_with_random_items"]

# An event is a hit when fewer than TOP of NUM_RIVALS random items score as high as its own item.
TOP = 10
NUM_RIVALS = 99
# The log is cut into so many parts; a frozen copy is as old as the start of its part.
NUM_PARTS = 10

_Ids = npt.NDArray[np.int64]
_Rows = npt.NDArray[Any]

# First word of a generator's seed, so that the random items of ranking and of training are independent.
_RANKING_STREAM = 1


# Not slotted: `cached_property` keeps its values in the instance's dictionary.
@dataclass(frozen=True, kw_only=True)
class Replay:
    """The log as a sequence of batches, each of which is scored and then trained on.

    Attributes:
        log: Events in time order.
        batch_events: Events a batch, ≥ 1; the last batch may have fewer.
        seed: Seed of the random items, ≥ 0.
    """

    log: EventLog
    batch_events: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_events < 1:
            raise ConfigError(f"a batch of {self.batch_events} events; it must be 1 or more")
        if self.num_batches < NUM_PARTS:
            raise ConfigError(
                f"{_count(self.log.num_events, 'event')} in {_count(self.num_batches, 'batch', 'es')} of "
                f"{self.batch_events}; the demo needs {NUM_PARTS} batches or more: a smaller --batch-events, or more "
                "--events or --max-events"
            )
        if self.log.num_items <= NUM_RIVALS:
            raise ConfigError(
                f"{_count(self.log.num_items, 'different item')}; ranking one among {NUM_RIVALS} others needs "
                f"{NUM_RIVALS + 1} or more: other --events, or more --max-events"
            )

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return -(-self.log.num_events // self.batch_events)

    @cached_property
    def part_starts(self) -> tuple[int, ...]:
        """The first batch of each of the log's NUM_PARTS parts, ascending, 0 first."""
        return tuple(part * self.num_batches // NUM_PARTS for part in range(NUM_PARTS))

    @cached_property
    def num_items_seen(self) -> _Ids:
        """int64[num_events]: how many items have appeared up to and with each event."""
        return np.maximum.accumulate(self.log.items) + 1

    def events_of(self, batch: int) -> slice:
        """Return where a batch's events lie in the log."""
        first = batch * self.batch_events
        return slice(first, min(first + self.batch_events, self.log.num_events))

    def candidates(self, batch: int) -> _Ids:
        """Return int64[b, 1 + NUM_RIVALS]: each event's own item, then the random ones it is ranked against."""
        events = self.events_of(batch)
        rng = np.random.default_rng((_RANKING_STREAM, self.seed, batch))
        return pair_with_random_items(rng, self.log.items[events], self.num_items_seen[events], NUM_RIVALS)


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def pair_with_random_items(rng: np.random.Generator, items: _Ids, num_items_seen: _Ids, num_random: int) -> _Ids:
    """Return each event's item followed by random other ones.

    Only items that have appeared up to the event are drawn: one that comes later would be an easy rival, since nothing
    has been learned of it.

    Args:
        rng: Source of randomness.
        items: int64[b], rows of the events' items.
        num_items_seen: int64[b], items that have appeared up to and with each event, > `items`.
        num_random: Random items an event, drawn with replacement.

    Returns:
        int64[b, 1 + num_random]. An event before which no other item has appeared is paired with its own item.
    """
    num_others = (num_items_seen - 1)[:, None]
    drawn = np.floor(rng.random((items.size, num_random)) * num_others).astype(np.int64)
    drawn += (drawn >= items[:, None]) & (num_others > 0)  # leaves the event's own item out
    return np.concatenate([items[:, None], drawn], axis=1)


def is_hit(user_rows: _Rows, item_rows: _Rows) -> npt.NDArray[np.bool_]:
    """Return which events rank their own item among the top TOP.

    Ties and NaN count against the event, so rows that are all alike, as missing ones are, never make a hit.

    Args:
        user_rows: float32[b, dim], each event's user.
        item_rows: float32[b, 1 + NUM_RIVALS, dim], each event's candidates, its own item first.

    Returns:
        bool[b].
    """
    scores = np.matmul(item_rows, user_rows[:, :, None])[:, :, 0]
    is_beaten = scores[:, 1:] < scores[:, :1]
    return np.asarray((~is_beaten).sum(axis=1) < TOP)
