"""What a check of `headrace doctor` has found."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial

__all__ = ["Finding", "Level", "note", "ok", "problem"]


class Level(enum.StrEnum):
    """The severity of a finding."""

    PROBLEM = "problem"
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `advice` is empty if there is nothing to do."""

    level: Level
    subject: str
    text: str
    advice: str = ""


ok, note, problem = (partial(Finding, level) for level in (Level.OK, Level.NOTE, Level.PROBLEM))
