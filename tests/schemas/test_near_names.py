"""What is said to somebody who has named what does not exist."""

from __future__ import annotations

import pytest

from headrace.schemas.near_names import describe_near


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
