"""How messages name some of many: to somebody who has named what does not exist, and else."""

from __future__ import annotations

import pytest

from headrace.schemas.near_names import describe_near, first_of


@pytest.mark.parametrize(
    ("known", "text"),
    [
        ([], "there is none"),
        (["item.weight"], "the nearest is 'item.weight'"),
        (
            ["users.weight", "items.weight", "item.weight", "item.weights"],
            "the nearest are 'item.weights', 'item.weight', 'items.weight'",
        ),
        (["x"], "there is 'x'"),
        (["z", "y", "x", "x"], "there are 'x', 'y', 'z'"),
        (list("zyxwv"), "there are 'v', 'w', 'x' and 2 more"),
    ],
    ids=["none", "one like it", "many like it", "one unlike it", "three unlike it", "many unlike it"],
)
def test_the_nearest_or_the_first_names(known: list[str], text: str) -> None:
    """Names like the wrong one come first; where none is like it, some of those that there are, and how many more."""
    assert describe_near("itme.weights", known) == text


@pytest.mark.parametrize(
    ("num_names", "text"), [(0, "none"), (1, "t0"), (4, "t0, t1, t2, t3"), (1_234, "t0, t1, t2, t3 and 1,230 more")]
)
def test_the_first_of_many(num_names: int, text: str) -> None:
    """A message has an end, however many tables there are, and says how many it leaves out."""
    assert first_of([f"t{number}" for number in range(num_names)]) == text
    assert first_of(["a", "b"], most=1) == "a and 1 more"
