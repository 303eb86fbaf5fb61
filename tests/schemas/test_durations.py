"""Durations in messages."""

from __future__ import annotations

import pytest

from headrace.schemas.durations import format_seconds


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (1, "1 s"),
        (0.999998, "1 s"),
        (0.05, "0.05 s"),
        (59.99712, "60 s"),
        (12.345, "12.3 s"),
        (600.0, "600 s"),
        (3599.998, "3600 s"),
        (1234567.0, "1230000 s"),
        (0, "0 s"),
    ],
)
def test_three_digits(duration_s: float, text: str) -> None:
    """Whatever arithmetic has made of it, a duration is told in three digits and without an exponent."""
    assert format_seconds(duration_s) == text
