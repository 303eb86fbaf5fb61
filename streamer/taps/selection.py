"""Which tables of a model are streamed: names and patterns that a user gives."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from headrace.schemas.errors import ConfigError
from headrace.schemas.near_names import describe_near

__all__ = ["Selection", "check_names"]


class Selection:
    """Chooses tables by name, and remembers what it was asked, to tell names that no table has.

    Attributes:
        names: Every table that it was asked about.
        unmatched: Names and patterns that no table has had so far.
    """

    def __init__(self, patterns: Iterable[str] | None = None) -> None:
        """Choose the tables that have one of the names or match one of the patterns (`*`, `?`, `[…]`).

        Args:
            patterns: None chooses all.

        Raises:
            ConfigError: There are none, they are one string, or not all are strings.
        """
        if isinstance(patterns, str) or not isinstance(patterns, Iterable | None):
            raise ConfigError(f"tables {patterns!r} is no list: give a list of names or patterns")
        listed = None if patterns is None else list(patterns)
        if not all(isinstance(pattern, str) for pattern in listed or ()):
            raise ConfigError(f"tables {listed} are not all names: give a list of names or patterns")
        self._patterns = None if listed is None else list(dict.fromkeys(listed))
        if self._patterns == []:
            raise ConfigError("tables is empty: give names or patterns of tables, or leave it out for all of them")
        self.names: list[str] = []
        self.unmatched = list(self._patterns or ())

    @property
    def is_of_all(self) -> bool:
        """Whether no names or patterns were given."""
        return self._patterns is None

    def takes(self, fqn: str) -> bool:
        """Return whether a table is streamed."""
        self.names.append(fqn)
        if self._patterns is None:
            return True
        matching = [p for p in self._patterns if p == fqn or fnmatch.fnmatchcase(fqn, p)]
        self.unmatched = [pattern for pattern in self.unmatched if pattern not in matching]
        return bool(matching)

    def check(self) -> None:
        """Check that every name and pattern is that of a table.

        Raises:
            ConfigError: One is not; names the nearest tables.
        """
        check_names(self.unmatched, self.names)


def check_names(unmatched: Iterable[str], names: Iterable[str]) -> None:
    """Refuse names and patterns that no table has.

    Args:
        unmatched: Those.
        names: Names of all tables.

    Raises:
        ConfigError: There is one.
    """
    for pattern in unmatched:
        raise ConfigError(f"tables: no table is named or matches {pattern!r}; {describe_near(pattern, names)}")
