"""Sizes in messages and tables, as people read them: in the units in which settings are given."""

from __future__ import annotations

__all__ = ["format_size"]


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
