"""The events of the demo: an interaction log as a CSV of `timestamp,user_id,item_id`, and its replay in batches.

The CSV reader is strict: a demo that skipped lines in silence would show figures of another log. Trainer and reader
derive batches, random items and the moments of freezing from the log and a seed, so nothing of them is sent.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ConfigError

__all__ = ["NUM_PARTS", "NUM_RIVALS", "SAMPLE", "TABLES", "TOP", "EventLog", "Replay", "draw", "is_hit", "read_events"]

SAMPLE = Path(__file__).with_name("sample_interactions.csv.gz")
TABLES = ("ebc.embedding_bags.user.weight", "ebc.embedding_bags.item.weight")  # fqns of users and items
TOP, NUM_RIVALS = 10, 99  # a hit: fewer than TOP of NUM_RIVALS random items score as high as the event's own item
NUM_PARTS = 10  # of the log; a frozen copy is as old as the start of its part

_HEADER = ("timestamp", "user_id", "item_id")
_COLUMNS = ",".join(_HEADER)
_RANKING_STREAM = 1  # first word of a generator's seed: ranking and training draw independent items

_Ids = npt.NDArray[np.int64]
_Scores = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLog:
    """Events in time order; events of one time keep the order of the file.

    Users and items are numbered in the order in which they appear. So the items seen up to some event are exactly the
    rows from 0 to the largest item up to there, and no row number depends on a later event.
    """

    timestamps: _Ids  # int64[n], ascending, in the file's own unit
    users: _Ids  # int64[n], row of each event's user, 0 to num_users - 1
    items: _Ids  # int64[n], row of each event's item, 0 to num_items - 1
    user_ids: _Ids  # int64[num_users], the file's id of each user row
    item_ids: _Ids  # int64[num_items], the file's id of each item row


def read_events(path: Path, *, max_events: int | None = None) -> EventLog:
    """Read an interaction log, gzipped or not; keep only the earliest `max_events`.

    Raises:
        ConfigError: The file cannot be read, or a line is not an event. The message names file and line.
    """
    try:
        with path.open("rb") as file:
            rows = _read_rows(path, file)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    rows = rows[np.argsort(rows[:, 0], kind="stable")][:max_events]
    users, user_ids = _number_by_appearance(rows[:, 1])
    items, item_ids = _number_by_appearance(rows[:, 2])
    return EventLog(timestamps=rows[:, 0].copy(), users=users, items=items, user_ids=user_ids, item_ids=item_ids)


def _read_rows(path: Path, file: io.BufferedReader) -> _Ids:
    """Return int64[n, 3], n ≥ 1, the events in the order of the file."""
    is_gzip = file.peek(2).startswith(b"\x1f\x8b")  # a pipe cannot seek
    raw = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file
    # `utf-8-sig` removes the byte order mark that spreadsheets write. Bytes that are not text become backslashes, which
    # no field can have, so that they are refused with the number of their line.
    text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="backslashreplace", newline="")
    lines = csv.reader(text, strict=True)
    try:
        numbers = np.fromiter(itertools.chain.from_iterable(_parse_lines(path, lines)), np.int64)
    except csv.Error as exc:
        raise ConfigError(f"{path}:{lines.line_num}: not CSV: {exc}") from exc
    except (gzip.BadGzipFile, zlib.error, EOFError) as exc:
        raise ConfigError(f"{path}:{lines.line_num + 1} or soon after: damaged gzip data: {exc}") from exc
    finally:
        text.detach()  # `read_events` closes the file
    if not numbers.size:
        raise ConfigError(f"{path}:{max(lines.line_num, 1)}: no events follow the header")
    return numbers.reshape(-1, len(_HEADER))


def _parse_lines(path: Path, lines: Any) -> Iterator[tuple[int, int, int]]:
    """Yield each event; `lines` is a csv reader, which counts the lines."""
    header = [field.strip() for field in next(lines, [])]
    if not lines.line_num:
        raise ConfigError(f"{path}:1: the file is empty; its first line must be {_COLUMNS}")
    if tuple(header) != _HEADER:
        raise ConfigError(f"{path}:1: the first line must be {_COLUMNS}, not {_shorten(','.join(header))}")
    for fields in lines:
        if fields:  # many files end with an empty line
            try:
                yield _parse_event(fields)
            except ValueError as exc:
                raise ConfigError(f"{path}:{lines.line_num}: {exc}") from exc


def _parse_event(fields: Sequence[str]) -> tuple[int, int, int]:
    if len(fields) != len(_HEADER):
        raise ValueError(f"{len(fields)} fields where {_COLUMNS} are {len(_HEADER)}")
    if tuple(field.strip() for field in fields) == _HEADER:
        raise ValueError("the header again, as in files that were joined; remove this line")
    time, user, item = (_parse_int(name, field.strip()) for name, field in zip(_HEADER, fields, strict=True))
    for name, value in (("user_id", user), ("item_id", item)):
        if value < 0:
            raise ValueError(f"{name} {value} is negative")
    return time, user, item


def _parse_int(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    # `int` alone would also accept "1_000" and the digits of every script.
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{name} {_shorten(text)} is not an integer")
    # The length first: Python refuses to convert thousands of digits, with another message.
    if len(digits.lstrip("0")) > 19 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"{name} {_shorten(text)} does not fit 64 bits")
    return int(text)


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "…")


def _number_by_appearance(ids: _Ids) -> tuple[_Ids, _Ids]:
    """Return (row of each id, id of each row), with rows numbered in the order in which ids first appear."""
    values, first_at, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first_at)
    row_of_value = np.empty(order.size, np.int64)
    row_of_value[order] = np.arange(order.size)
    return row_of_value[inverse], values[order]


@dataclass(frozen=True, kw_only=True)  # without slots, for `cached_property`
class Replay:
    """The log as a sequence of batches, each of which is scored and then trained on."""

    log: EventLog
    batch_events: int  # ≥ 1; the last batch may have fewer
    seed: int  # of the random items, ≥ 0

    def __post_init__(self) -> None:
        num_events, num_items = self.log.users.size, self.log.item_ids.size
        if self.num_batches < NUM_PARTS:
            raise ConfigError(
                f"{num_events} events in {self.num_batches} batches of {self.batch_events}; the demo needs {NUM_PARTS} "
                "batches or more: a smaller --batch-events, or more --events or --max-events"
            )
        if num_items <= NUM_RIVALS:
            raise ConfigError(
                f"{num_items} different items; ranking one among {NUM_RIVALS} others needs {NUM_RIVALS + 1} or more: "
                "other --events, or more --max-events"
            )

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return -(-self.log.users.size // self.batch_events)

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
        return slice(first, min(first + self.batch_events, self.log.users.size))

    def candidates(self, batch: int) -> _Ids:
        """Return int64[b, 1 + NUM_RIVALS]: each event's own item, then the random ones that it is ranked against."""
        events = self.events_of(batch)
        rng = np.random.default_rng((_RANKING_STREAM, self.seed, batch))
        return draw(rng, self.log.items[events], self.num_items_seen[events], NUM_RIVALS)


def draw(rng: np.random.Generator, items: _Ids, num_items_seen: _Ids, num_random: int) -> _Ids:
    """Return int64[b, 1 + num_random]: each event's item, then random other ones, drawn with replacement.

    Only items that have appeared up to the event are drawn, of which there are int64[b] `num_items_seen`: one that
    comes later would be an easy rival, since nothing has been learned of it. An event before which no other item has
    appeared is paired with its own item.
    """
    num_others = (num_items_seen - 1)[:, None]
    drawn = np.floor(rng.random((items.size, num_random)) * num_others).astype(np.int64)
    drawn += (drawn >= items[:, None]) & (num_others > 0)  # skips the event's own item
    return np.concatenate([items[:, None], drawn], axis=1)


def is_hit(scores: _Scores) -> npt.NDArray[np.bool_]:
    """Return bool[b], whether each event ranks its own item among the top TOP.

    `scores` are float32[b, 1 + NUM_RIVALS], each event's own item first. Ties and NaN count against the event, so
    scores that are all alike, as those of missing rows are, never make a hit.
    """
    is_beaten = scores[:, 1:] < scores[:, :1]
    return np.asarray((~is_beaten).sum(axis=1) < TOP)
