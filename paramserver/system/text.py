"""Write durations, sizes, lists of names, and names themselves for people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from headrace.schemas.table_names import CONTROLS, path_of

__all__ = [
    "BYTES_BY_UNIT",
    "SECONDS_BY_UNIT",
    "counted",
    "describe_near",
    "first_of",
    "format_seconds",
    "format_size",
    "visible",
]

SECONDS_BY_UNIT: Mapping[str, float] = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
"""Units that a duration may be given in."""

BYTES_BY_UNIT: Mapping[str, int] = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""Units that a size may be given in."""

_MAX_NAMES = 3


def format_seconds(duration_s: float) -> str:
    """Return finite seconds with their unit, to three digits: "1 s" instead of "0.999998 s"."""
    return f"{float(f'{duration_s:.3g}'):.15g} s"


def format_size(size_bytes: float) -> str:
    """Return a size, at least 0, in its largest unit up to TiB, with one decimal from KiB on."""
    if size_bytes < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_bytes /= 1024
        if size_bytes < 1023.95:  # anything larger would round to 1024.0
            return f"{size_bytes:.1f} {unit}"
    return f"{size_bytes / 1024:,.1f} TiB"


def counted(number: int, noun: str) -> str:
    """Return how many there are of a noun whose plural ends in -s: "1 row", "1,200 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_near(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known names, or the first ones.

    Of tables' names the path may be similar alone, however long the model's name before it is.
    """
    names = sorted(set(known))
    if not names:
        return "there is none"
    called = {path_of(each): each for each in names} | {each: each for each in names}
    near = list(dict.fromkeys(called[text] for text in difflib.get_close_matches(name, called, n=2 * _MAX_NAMES)))
    near = near[:_MAX_NAMES]
    if near:
        return f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(map(repr, near))}"
    some = first_of([*map(repr, names)], most=_MAX_NAMES)
    return f"there {'is' if len(names) == 1 else 'are'} {some}"


def first_of(names: Sequence[str], *, most: int = 4) -> str:
    """Return the first names and how many more there are; "none" when there are no names."""
    more = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {more:,} more" if more > 0 else "")


def visible(text: str) -> str:
    r"""Return a text in which control characters are written out: a line break as `\n`, an escape as `\x1b`.

    Names come from clients and files. Shown as they are, they could write on a terminal, or forge a line of a log.
    """
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
