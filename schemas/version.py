"""Versions of rows, (epoch, step), and their order.

Epochs compare first, so every row of a restarted run is newer than any row of the epochs before it. Single versions are
tuples, which Python compares in this order; this module compares arrays of them. The last record of a row in its log
counts, whatever its version; versions decide only what no single log orders: layouts of columns, identities, scalars,
and dense parts. Each caller says what happens between equal versions: mostly the later one wins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_EPOCH",
    "MAX_STEP",
    "Version",
    "is_newer",
    "is_newer_record",
    "last_epoch_after",
]

# ON DISK: a record has 32 bits for it.
MAX_EPOCH = 2**32 - 1
MAX_STEP = 2**63 - 1

# Shards accept any epoch up to the first number, and above it those at most the second number above their highest.
_FREE_EPOCHS, _MAX_EPOCHS_AHEAD = 2**31, 2**20

Version = tuple[int, int]
"""(epoch, step)."""

_Mask = npt.NDArray[np.bool_]


def is_newer(epochs: Any, steps: Any, than_epochs: Any, than_steps: Any) -> _Mask:
    """Return which versions are newer than others, bool[n]; equal ones are not.

    Each argument is an integer array or one integer for all rows; at least one is an array. Negate the result for "as
    old or older"; swap the pairs for "older".

    Args:
        epochs: int64[n] or uint32[n].
        steps: int64[n].
        than_epochs: Epochs to compare with.
        than_steps: Steps to compare with.
    """
    newer: _Mask = (epochs > than_epochs) | ((epochs == than_epochs) & (steps > than_steps))
    return newer


def is_newer_record(records: npt.NDArray[Any], than: npt.NDArray[Any]) -> _Mask:
    """Return which records have a newer version than others, bool[n]; equal ones have not.

    Args:
        records: Structured array[n] with the fields `epoch` and `step`.
        than: Records to compare with, likewise.
    """
    return is_newer(records["epoch"], records["step"], than["epoch"], than["step"])


def last_epoch_after(highest: int) -> int:
    """Return the highest epoch that a shard accepts after it has seen `highest`.

    A trainer takes the highest epoch plus one. The limit keeps a client with a wrong epoch from using up the numbers:
    one leaves half of all epochs, and it takes thousands of such clients to leave none.
    """
    return min(max(highest, _FREE_EPOCHS) + _MAX_EPOCHS_AHEAD, MAX_EPOCH)
