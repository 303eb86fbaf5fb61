"""Which table's column a tensor of a file is: rules of the user, and the names that checkpoints give to states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace.schemas.errors import ConfigError

__all__ = ["IDENTITIES", "Naming", "find_states"]

IDENTITIES = "identities:"
"""Stands in the place of a state's name where a tensor is the raw ids behind the rows; no state is called so."""


class Naming:
    """Rules `NAME=FQN` or `NAME=FQN/STATE`; a `*` stands for any characters, the same ones on both sides."""

    def __init__(self, rules: Iterable[str]) -> None:
        """Read the rules; of several that fit, the first counts.

        Raises:
            ConfigError: One is none.
        """
        self._rules: list[tuple[re.Pattern[str], str]] = []
        self._unused: dict[int, str] = {}
        for rule in rules:
            name, sign, target = rule.partition("=")
            if not (name and sign and target) or target.count("*") > name.count("*"):
                raise ConfigError(f"--map {rule!r}: not NAME=FQN or NAME=FQN/STATE, with no more * on the right")
            pattern = "(.*)".join(map(re.escape, name.split("*")))
            self._unused[len(self._rules)] = rule
            self._rules.append((re.compile(pattern), target))

    def target_of(self, name: str) -> str | None:
        """Return what a name is mapped to; None where no rule fits."""
        found = None
        for number, (pattern, target) in enumerate(self._rules):
            match = pattern.fullmatch(name)
            if match:
                self._unused.pop(number, None)
                if found is None:
                    parts = target.split("*")
                    groups = [*match.groups()][: len(parts) - 1]
                    found = "".join(a + b for a, b in zip(parts, [*groups, ""], strict=True))
        return found

    def check_used(self, where: str) -> None:
        """Check that each rule has fit a name that was asked for: one that fits none is misspelled.

        Raises:
            ConfigError: One has not.
        """
        for rule in self._unused.values():
            raise ConfigError(f"--map {rule!r}: fits nothing in {where}")


def find_states(fqn: str, name: str, names: Iterable[str]) -> Mapping[str, str]:
    """Return the tensors that hold optimizer states of a table, by the states' names, and its `IDENTITIES`.

    They are found as `headrace export` names them (`FQN/STATE`), and as checkpoints of optimizers do
    (`….state.FQN.STATE`, TorchRec's with the table's short name in between).

    Args:
        fqn: The table.
        name: Of its weights in the file.
        names: All tensors of the file.
    """
    own = re.compile(rf"{re.escape(name)}/([^/]+)")
    stems = "|".join(re.escape(stem) for stem in dict.fromkeys((fqn, name)))
    optimizers = re.compile(rf"(?:.*\.)?state\.(?:{stems})\.(?:[^.]+\.)?([^.]+)")
    found: dict[str, str] = {}
    for other in names:
        match = own.fullmatch(other) or optimizers.fullmatch(other)
        if match and match[1] not in ("step", "iter"):
            if match[1] in found:
                raise ConfigError(
                    f"{found[match[1]]!r} and {other!r} both look like state {match[1]!r} of {fqn!r}: say which with "
                    f"--map NAME={fqn}/{match[1]}"
                )
            found[match[1]] = other
    return found
