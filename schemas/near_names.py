"""How messages name some of many: the nearest to a name that does not exist, or the first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["describe_near", "first_of"]

_MAX_NAMES = 3


def describe_near(name: str, known: Iterable[str]) -> str:
    """Return the end of a message: the known names that are most like a name, or the first ones if none is.

    Args:
        name: One that is not known.
        known: All that are, in any order.
    """
    names = sorted(set(known))
    if not names:
        return "there is none"
    near = difflib.get_close_matches(name, names, n=_MAX_NAMES)
    if near:
        return f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(map(repr, near))}"
    some = first_of([*map(repr, names)], most=_MAX_NAMES)
    return f"there {'is' if len(names) == 1 else 'are'} {some}"


def first_of(names: Sequence[str], *, most: int = 4) -> str:
    """Return the first of some names, and how many there are besides; "none" for none.

    Args:
        names: In the order in which they are named.
        most: How many of them.
    """
    more = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {more:,} more" if more > 0 else "")
