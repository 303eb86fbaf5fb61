"""How sizes are written."""

from __future__ import annotations

import pytest

from headrace.schemas.sizes import format_size


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1023 << 10, "1023.0 KiB"),
        (1_500_000, "1.4 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (2000 << 40, "2,000.0 TiB"),
    ],
)
def test_the_largest_unit_that_fits(size_bytes: int, text: str) -> None:
    """A size is a number that fits into three or four digits, and its unit."""
    assert format_size(size_bytes) == text
