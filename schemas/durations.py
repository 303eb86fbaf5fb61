"""Durations as people write and read them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["SECONDS_BY_UNIT", "format_seconds"]

SECONDS_BY_UNIT: Mapping[str, float] = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
"""The units in which durations are given."""


def format_seconds(duration_s: float) -> str:
    """Return a duration with its unit, to three digits: what is left of a second is "1 s", not "0.999998 s".

    Args:
        duration_s: Seconds, finite.
    """
    return f"{float(f'{duration_s:.3g}'):.15g} s"
