"""Durations, sizes and lists of names in messages."""

from __future__ import annotations

import pytest

from headrace.paramserver.system.text import describe_near, first_of, format_seconds, format_size, visible


def test_control_characters_are_visible() -> None:
    """What a terminal acts on is written out; all other text stays, in any script."""
    assert visible("a\x00\t\n\x1b[2J\x7f\x85\x9f\u2028b") == r"a\x00\t\n\x1b[2J\x7f\x85\x9f\u2028b"
    assert visible("a\u202eb\u2066c\u2069") == r"a\u202eb\u2066c\u2069"
    assert visible("größe/模型 [x]\\y") == "größe/模型 [x]\\y"


def test_durations_and_sizes() -> None:
    """Durations have three digits and no exponent; sizes at most four and the largest unit that fits."""
    durations_s = (1, 0.999998, 0.05, 59.99712, 12.345, 600.0, 3599.998, 1234567.0, 0)
    texts = ["1 s", "1 s", "0.05 s", "60 s", "12.3 s", "600 s", "3600 s", "1230000 s", "0 s"]
    assert [format_seconds(duration_s) for duration_s in durations_s] == texts
    sizes = (0, 1023, 1024, 1023 << 10, 1_500_000, (1 << 20) - 1, 5 << 30, 3 << 40, 2000 << 40)
    texts = ["0 B", "1023 B", "1.0 KiB", "1023.0 KiB", "1.4 MiB", "1.0 MiB", "5.0 GiB", "3.0 TiB", "2,000.0 TiB"]
    assert [format_size(size_bytes) for size_bytes in sizes] == texts


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ("", "there is none"),
        ("item.weight", "the nearest is 'item.weight'"),
        (
            "users.weight items.weight item.weight item.weights",
            "the nearest are 'item.weights', 'item.weight', 'items.weight'",
        ),
        ("ranking-in-production:item.weights x", "the nearest is 'ranking-in-production:item.weights'"),
        ("x", "there is 'x'"),
        ("z y x x", "there are 'x', 'y', 'z'"),
        ("z y x w v", "there are 'v', 'w', 'x' and 2 more"),
    ],
)
def test_similar_names_come_first(known: str, text: str) -> None:
    """A message names the most similar names, or else the first ones and how many more there are."""
    assert describe_near("itme.weights", known.split()) == text


@pytest.mark.parametrize(
    ("num_names", "text"), [(0, "none"), (1, "t0"), (4, "t0, t1, t2, t3"), (1_234, "t0, t1, t2, t3 and 1,230 more")]
)
def test_the_first_of_many(num_names: int, text: str) -> None:
    """A message stays short however many names there are, and says how many it omits."""
    assert first_of([f"t{number}" for number in range(num_names)]) == text
    assert first_of(["a", "b"], most=1) == "a and 1 more"
