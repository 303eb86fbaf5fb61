"""What to say to somebody who has named what does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["describe_near"]

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
    some = ", ".join(map(repr, names[:_MAX_NAMES]))
    if len(names) > _MAX_NAMES:
        some += f" and {len(names) - _MAX_NAMES:,} more"
    return f"there {'is' if len(names) == 1 else 'are'} {some}"
