"""What people are told of a table that lacks rows, given its `Filling`, of a catalog or of the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["INCOMPLETE", "UPDATED_ONLY", "merged_lack", "what_lacks"]

INCOMPLETE, UPDATED_ONLY = "incomplete", "updated rows only"
"""The trainer has not sent all rows yet, or is not to."""


def what_lacks(filling: Any) -> str:
    """Return `INCOMPLETE`, `UPDATED_ONLY` or "", given a table's `Filling` or None."""
    return "" if filling is None else UPDATED_ONLY if filling.updated_only else INCOMPLETE


def merged_lack(of_shards: Iterable[str]) -> str:
    """Return what a table lacks, given `what_lacks` of its shards."""
    return min((lack for lack in of_shards if lack), default="", key=(INCOMPLETE, UPDATED_ONLY).index)
