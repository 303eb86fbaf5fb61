"""What a check of `headrace doctor` has found."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Level", "note", "ok", "problem"]


class Level(enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of one check; `advice` is empty if there is nothing to do."""

    subject: str
    level: Level
    text: str
    advice: str = ""


def ok(subject: str, text: str) -> Finding:
    """Return that all is well."""
    return Finding(subject=subject, level=Level.OK, text=text)


def note(subject: str, text: str, advice: str = "") -> Finding:
    """Return what is worth knowing, and may be right."""
    return Finding(subject=subject, level=Level.NOTE, text=text, advice=advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """Return what must be mended."""
    return Finding(subject=subject, level=Level.PROBLEM, text=text, advice=advice)
