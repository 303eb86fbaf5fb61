"""Sizes as people write and read them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BYTES_BY_UNIT", "format_size"]

BYTES_BY_UNIT: Mapping[str, int] = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""The units in which sizes are given."""


def format_size(size_bytes: float) -> str:
    """Return a size in its largest unit up to TiB, with one decimal from KiB on.

    Args:
        size_bytes: ≥ 0.
    """
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1023.95:  # what is more would be shown as 1024.0
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:,.1f} TiB"
