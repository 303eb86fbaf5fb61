"""Find the optimizers of a trainer behind their wrappers, and select tables and dense tensors by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from headrace.kernels.module_walk import is_a
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.schemas.table_names import DEFAULT_MODEL, model_of, name_in

__all__ = ["Selection", "check_apart", "check_names", "inner_optimizers", "listed_names", "names_by_path", "or_without"]

# By a wrapper's class, the attribute that holds one optimizer. These write no table themselves: TorchRec's,
# Lightning's, Accelerate's.
_OPTIMIZER_WRAPPERS = {
    "KeyedOptimizerWrapper": "_optimizer",
    "OptimizerWrapper": "_optimizer",
    "LightningOptimizer": "_optimizer",
    "AcceleratedOptimizer": "optimizer",
}


def inner_optimizers(
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> list[torch.optim.Optimizer]:
    """Return the optimizers that really step, out of one or several, wrapped or not; each once, in order.

    The step hooks of TorchRec's wrappers (`KeyedOptimizerWrapper`, `CombinedOptimizer`, `WarmupOptimizer` …) never run,
    and their fused members do nothing in `step()`: their update is part of `backward()`. The wrappers of Lightning
    (`LightningModule.optimizers()`) and Accelerate (`prepare`) have no step hooks either.

    Raises:
        ConfigError: One of them is no optimizer.
    """
    is_one = isinstance(optimizers, torch.optim.Optimizer | nn.Module | Mapping) or not isinstance(optimizers, Iterable)
    several: Iterable[Any] = [optimizers] if is_one else optimizers  # type: ignore[assignment]
    found: dict[int, torch.optim.Optimizer] = {}
    for optimizer in several:
        for inner in _inner_optimizers(optimizer):
            found.setdefault(id(inner), inner)
    return list(found.values())


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    attribute = next((name for kind, name in _OPTIMIZER_WRAPPERS.items() if is_a(optimizer, kind)), None)
    if is_a(optimizer, "CombinedOptimizer"):
        for _, member in optimizer.optimizers:  # type: ignore[attr-defined]
            yield from _inner_optimizers(member)
    elif attribute is not None:
        yield from _inner_optimizers(getattr(optimizer, attribute))
    elif not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: a {type(optimizer).__name__} is not one; give the torch.optim.Optimizer that trains the "
            "tables, a list of them, or the one inside a wrapper"
        )
    elif not is_a(optimizer, "FusedOptimizer"):
        yield optimizer


def listed_names(names: Iterable[str], *, argument: str, may_be_empty: bool = False) -> list[str]:
    """Return names or patterns, each once.

    Raises:
        ConfigError: It is empty, a single string, or holds something else than strings; the message has `argument`.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(f"{argument} {names!r} is not a list: give a list of names or patterns")
    listed = list(names)
    if not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"{argument} {listed} are not all names: give a list of names or patterns")
    if not listed and not may_be_empty:
        raise ConfigError(f"{argument} is empty: give names or patterns, or omit it")
    return list(dict.fromkeys(listed))


def names_by_path(
    names: Mapping[str, str] | None, tables: Collection[str], tensors: Iterable[str] = ()
) -> dict[str, str]:
    """Return by what names a model's tables and tensors are on the server, by the paths of those that `names` renames.

    Raises:
        ConfigError: `names` is no mapping from paths to names, has a path that the model lacks, or names two tables
            alike.
    """
    given: Any = {} if names is None else names
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ConfigError(f"names {names!r} is no mapping: give names on the server by paths in the model")
    paths = {*tables, *tensors}
    modules = {path[:at] for path in paths for at in range(len(path)) if path[at] == "."} | {""}
    unknown = [path for path in given if path not in paths and path not in modules]
    check_names(unknown, paths | modules - {""}, argument="names", kind="table, tensor or module")
    for name in given.values():
        if model_of(name) != DEFAULT_MODEL:
            raise ConfigError(f"names: {name!r} has a model: give the name behind the colon, and the model as model=…")
    called = {path: name for path in sorted(paths) if (name := name_in(given, path)) is not None}
    for path, name in called.items():
        if not name:
            raise ConfigError(f"names: {path!r} would have no name: give it one, as only a module may have none")
    check_apart(tables, called)
    return called


def check_apart(paths: Iterable[str], called: Mapping[str, str]) -> None:
    """Raise ConfigError if two of these paths have the same name on the server."""
    path_of_name: dict[str, str] = {}
    for path in sorted(paths):
        name = called.get(path, path)
        other = path_of_name.setdefault(name, path)
        if other != path:
            raise ConfigError(f"names: {other!r} and {path!r} would both be {name!r}: give each its own name")


def or_without(*names: str, argument: str = "tables") -> str:
    """Return how a refusal ends: the argument of `attach` and `restore` that leaves the tables, or tensors, out."""
    what = "it" if len(names) == 1 else "them"
    return f"; or leave {what} out, {argument}=[{', '.join(repr(f'!{name}') for name in names)}] (docs/taps.md)"


class Selection:
    """Selects tables, or dense tensors, by name or pattern, and finds names that match none.

    A name or pattern behind `!` leaves out what it matches. If there are no others, everything else is selected.
    """

    def __init__(
        self, patterns: Iterable[str] | None = None, *, argument: str = "tables", may_be_empty: bool = False
    ) -> None:
        """Select by name or pattern (`*`, `?`, `[…]`); None selects all. `argument` is what errors name.

        Raises:
            ConfigError: It is empty, a single string, or holds something else than strings.
        """
        given = None if patterns is None else listed_names(patterns, argument=argument, may_be_empty=may_be_empty)
        self._left_out = [pattern[1:] for pattern in given or () if pattern.startswith("!")]
        wanted = [pattern for pattern in given or () if not pattern.startswith("!")]
        self._patterns = None if given is None or (self._left_out and not wanted) else wanted
        self.names: list[str] = []  # all tables that `takes` was called for
        self._spoiled: list[tuple[str, str]] = []
        self.unmatched = [*wanted, *self._left_out]  # names and patterns without a table so far

    @property
    def is_of_all(self) -> bool:
        """Whether no names or patterns were given, or only those of tables to leave out."""
        return self._patterns is None

    def has_name(self, fqn: str) -> bool:
        """Return whether this very name was given."""
        return self._patterns is not None and fqn in self._patterns

    def names_in(self, path: str) -> bool:
        """Return whether an unmatched name or pattern begins with a module's path, or is it."""
        wanted = set(self.unmatched) - set(self._left_out)
        return any(pattern == path or pattern.startswith(f"{path}.") for pattern in wanted)

    @property
    def leaves_none_out(self) -> bool:
        """Whether every table is selected."""
        return self.is_of_all and not self._left_out

    def note_left_out(self, names: Iterable[str]) -> set[str]:
        """Note the names of what cannot be selected: a name or pattern that leaves one out matches something.

        Return those that are left out.
        """
        left_out = set()
        for name in names:
            if matching := _matching(self._left_out, name):
                left_out.add(name)
                self.unmatched = [pattern for pattern in self.unmatched if pattern not in matching]
        return left_out

    def spoil(self, path: str, reason: str) -> None:
        """Have `takes` refuse the tables in a module, with this reason, if they are selected."""
        self._spoiled.append((f"{path}." if path else "", reason))

    def selects(self, fqn: str) -> bool:
        """Return whether the patterns select a name; notes nothing."""
        is_wanted = self._patterns is None or bool(_matching(self._patterns, fqn))
        return is_wanted and not _matching(self._left_out, fqn)

    def takes(self, fqn: str) -> bool:
        """Return whether a table or tensor is selected.

        Raises:
            UnsupportedModelError: It is, and is in a module that was spoiled.
        """
        self.names.append(fqn)
        matching = {*_matching(self._patterns or (), fqn), *_matching(self._left_out, fqn)}
        self.unmatched = [pattern for pattern in self.unmatched if pattern not in matching]
        is_taken = self.selects(fqn)
        for prefix, reason in self._spoiled if is_taken else ():
            if fqn.startswith(prefix):
                raise UnsupportedModelError(f"{reason}{or_without(f'{prefix}*')}")
        return is_taken


def _matching(patterns: Iterable[str], name: str) -> list[str]:
    return [pattern for pattern in patterns if pattern == name or fnmatch.fnmatchcase(name, pattern)]


def check_names(
    unmatched: Iterable[str], names: Iterable[str], *, argument: str = "tables", kind: str = "table"
) -> None:
    """Raise ConfigError if there is an unmatched name or pattern; list the nearest of all names."""
    for pattern in unmatched:
        raise ConfigError(f"{argument}: no {kind} is named or matches {pattern!r}; {describe_near(pattern, names)}")
