"""The interaction log that the demo trains on: a CSV of `timestamp,user_id,item_id`, plain or gzipped.

The reader is strict. Whatever is not an event is an error that names the file and the line, since a demo that skips
lines in silence would show numbers about another log.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from headrace.schemas.errors import ConfigError

__all__ = ["HEADER", "SAMPLE_PATH", "EventLog", "read_events"]

HEADER = ("timestamp", "user_id", "item_id")
SAMPLE_PATH = Path(__file__).with_name("sample_interactions.csv.gz")
_GZIP_MAGIC = b"\x1f\x8b"
_INT64 = np.iinfo(np.int64)

_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLog:
    """Events in time order; events of one time keep the order of the file.

    Users and items are numbered as they first appear, so that the rows of the items seen up to some event are exactly
    `0 … largest item up to there`, and no row tells of a later event.

    Attributes:
        timestamps: int64[n], ascending, in the file's own unit.
        users: int64[n], row of each event's user, 0 to num_users - 1.
        items: int64[n], row of each event's item, 0 to num_items - 1.
        user_ids: int64[num_users], the file's id of each user row.
        item_ids: int64[num_items], the file's id of each item row.
    """

    timestamps: _Ids
    users: _Ids
    items: _Ids
    user_ids: _Ids
    item_ids: _Ids

    @property
    def num_events(self) -> int:
        """Number of events."""
        return self.users.size

    @property
    def num_users(self) -> int:
        """Number of different users."""
        return self.user_ids.size

    @property
    def num_items(self) -> int:
        """Number of different items."""
        return self.item_ids.size

    def save(self, path: Path) -> None:
        """Write the log to a file of numpy's `.npz` format."""
        np.savez(path, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> EventLog:
        """Read a log written by `save`."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in cls.__slots__})


def read_events(path: Path, *, max_events: int | None = None) -> EventLog:
    """Read an interaction log.

    Args:
        path: CSV with the header `timestamp,user_id,item_id`; gzipped or not, as its first bytes tell.
        max_events: Keep only the earliest so many, ≥ 1; None keeps all.

    Raises:
        ConfigError: The file cannot be read, or a line of it is not an event. The message names file and line.
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
    """Return int64[n, 3], n ≥ 1, the file's events in its own order."""
    # Not by seeking back: the file may be a pipe.
    is_gzip = file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC)
    # A GzipFile is all that a text wrapper needs, but its stubs do not call it a BinaryIO.
    raw = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file
    # Spreadsheets put a byte order mark before the header; `utf-8-sig` takes it away. Bytes that are no text become
    # backslashes, which no field can have, so that they are refused with the number of their line.
    text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="backslashreplace", newline="")
    lines = csv.reader(text, strict=True)
    try:
        numbers = np.fromiter(itertools.chain.from_iterable(_parse_lines(path, lines)), np.int64)
    except csv.Error as exc:
        raise ConfigError(f"{path}:{lines.line_num}: not CSV: {exc}") from exc
    except (gzip.BadGzipFile, zlib.error, EOFError) as exc:
        raise ConfigError(f"{path}:{lines.line_num + 1} or soon after: damaged gzip data: {exc}") from exc
    finally:
        text.detach()  # the file is its opener's to close
    if not numbers.size:
        raise ConfigError(f"{path}:{max(lines.line_num, 1)}: no events follow the header")
    return numbers.reshape(-1, len(HEADER))


def _parse_lines(path: Path, lines: Iterator[list[str]]) -> Iterator[tuple[int, int, int]]:
    """Yield each event; `lines` is a csv reader, which counts the lines."""
    header = [field.strip() for field in next(lines, [])]
    if not header and not _line_num(lines):
        raise ConfigError(f"{path}:1: the file is empty; its first line must be {','.join(HEADER)}")
    if tuple(header) != HEADER:
        raise ConfigError(f"{path}:1: the first line must be {','.join(HEADER)}, not {_shorten(','.join(header))}")
    for fields in lines:
        if fields:  # an empty line, as at the end of many files, says nothing
            try:
                yield _parse_event(fields)
            except ValueError as exc:
                raise ConfigError(f"{path}:{_line_num(lines)}: {exc}") from exc


def _parse_event(fields: Sequence[str]) -> tuple[int, int, int]:
    if len(fields) != len(HEADER):
        raise ValueError(f"{len(fields)} fields where {','.join(HEADER)} are {len(HEADER)}")
    if tuple(field.strip() for field in fields) == HEADER:
        raise ValueError("the header again, as in files that were joined; remove this line")
    time, user, item = (_parse_int(name, field) for name, field in zip(HEADER, fields, strict=True))
    for name, value in ((HEADER[1], user), (HEADER[2], item)):
        if value < 0:
            raise ValueError(f"{name} {value} is negative")
    return time, user, item


def _parse_int(name: str, field: str) -> int:
    text = field.strip()
    digits = text.removeprefix("-")
    # `int` alone would take "1_000" and the digits of every script too.
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"{name} {_shorten(text)} is not an integer")
    # The length first: Python refuses to convert some thousands of digits, in other words.
    if len(digits.lstrip("0")) > 19 or not _INT64.min <= int(text) <= _INT64.max:
        raise ValueError(f"{name} {_shorten(text)} does not fit 64 bits")
    return int(text)


def _line_num(lines: Iterator[list[str]]) -> int:
    return int(lines.line_num)  # type: ignore[attr-defined]  # the csv reader's type has no public name before 3.12


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "…")


def _number_by_appearance(ids: _Ids) -> tuple[_Ids, _Ids]:
    """Return (row of each id, id of each row), rows numbered in the order in which ids first appear."""
    values, first_at, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first_at)
    row_of_value = np.empty(order.size, np.int64)
    row_of_value[order] = np.arange(order.size)
    return row_of_value[inverse], values[order]
