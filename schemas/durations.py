"""Durations in messages, as people read them."""

from __future__ import annotations

__all__ = ["format_seconds"]


def format_seconds(duration_s: float) -> str:
    """Return a duration with its unit, to three digits: what is left of a second is "1 s", not "0.999998 s".

    Args:
        duration_s: Seconds, finite.
    """
    return f"{float(f'{duration_s:.3g}'):.15g} s"
