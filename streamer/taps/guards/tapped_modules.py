"""Remember which modules are streamed, to refuse a second tap, and detect modules that were replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import nn

from headrace.schemas.errors import UnsupportedModelError

__all__ = [
    "Left",
    "ModulePlace",
    "ModulePlaces",
    "UsedPlaces",
    "WeightPlace",
    "add_tapped",
    "check_untapped",
    "is_tapped",
    "leave",
    "owners_of",
    "remove_tapped",
    "take_left",
]

# Modules whose tables are tapped, with the streamer that has done it; None for a call only.
_tapped_modules: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any] | None] = weakref.WeakKeyDictionary()
# Modules that a streamer has left, with rows that it may not have sent.
_left_modules: weakref.WeakKeyDictionary[nn.Module, Left] = weakref.WeakKeyDictionary()


class Left(NamedTuple):
    """What the next streamer of a module has to know, besides that it has to send all rows.

    Attributes:
        step: The last step; -1 if nothing is known of it.
        evicted: By table, global ids of rows to delete.
    """

    step: int
    evicted: Mapping[str, Sequence[int]]


def check_untapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules, given with their paths, that are tapped: a second tap would stream everything twice."""
    for path, module in modules:
        if is_tapped(module):
            raise UnsupportedModelError(
                f"module {path or type(module).__name__!r} is streamed already, by this streamer or another: "
                f"attach(..., replace=True) closes the other one first, and so does headrace.detach(model)"
            )


def is_tapped(module: nn.Module) -> bool:
    """Return whether a module is tapped, by any streamer that is still there."""
    if module not in _tapped_modules:
        return False
    ref = _tapped_modules[module]
    return ref is None or ref() is not None


def owners_of(model: nn.Module) -> list[Any]:
    """Return the streamers that have tapped a module of a model."""
    owners = [_owner_of(module) for module in model.modules()]
    return list({id(owner): owner for owner in owners if owner is not None}.values())


def leave(owner: Any, left: Left) -> None:
    """Note that a streamer leaves all its modules, and may not have sent all of their rows."""
    _left_modules.update((module, left) for module in list(_tapped_modules) if _owner_of(module) is owner)


def take_left(model: nn.Module) -> list[Left]:
    """Return what streamers have left of a model, those too that were lost without a `close`; once."""
    left = [_left_modules.pop(module, None) for module in model.modules()]
    return [each for each in left if each is not None]


def add_tapped(modules: Iterable[tuple[str, nn.Module]], owner: Any) -> None:
    """Record that modules are tapped, by a streamer or, with None, for a call only."""
    ref = None if owner is None else weakref.ref(owner)
    for _, module in modules:
        if module in _tapped_modules:  # by a streamer that is gone
            _left_modules.setdefault(module, Left(-1, {}))
        _tapped_modules[module] = ref


def remove_tapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Record that modules are no longer tapped."""
    for _, module in modules:
        _tapped_modules.pop(module, None)


def _owner_of(module: nn.Module) -> Any:
    ref = _tapped_modules.get(module)
    return None if ref is None else ref()


# One step on the path to a module: the parent's children, the child's name, the child.
_Link = tuple[dict[str, nn.Module | None], str, nn.Module]


class ModulePlaces:
    """The paths to all modules of a model, found in one walk. Not to be kept, since it keeps every module alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._links = dict(_paths(model))

    def of(self, module: nn.Module) -> ModulePlace:
        """Return the place of a module of the model."""
        return ModulePlace(self._model, module, self._links.get(module, []))


class ModulePlace:
    """Detects that another module has replaced this one, for example a table recreated to grow.

    What trains after that is not what was attached.
    """

    def __init__(self, model: nn.Module, module: nn.Module, links: list[_Link]) -> None:
        self._model, self.module, self.links = model, module, links

    def is_kept(self) -> bool:
        """Return whether no other module is in this one's place; True for a module that was removed.

        Looks at each module on the path. If one was wrapped since, searches the model once.
        """
        if all(children.get(name) is child for children, name, child in self.links):
            return True
        links = next((links for module, links in _paths(self._model) if module is self.module), None)
        if links is not None:
            self.links = links
            return True
        return any(children.get(name) is None for children, name, _ in self.links)

    __call__ = is_kept


class WeightPlace:
    """Detects that a parameter is no longer the weight of a module of the model."""

    def __init__(self, parameter: nn.Parameter, place: ModulePlace) -> None:
        self.parameter, self.place = parameter, place

    def __call__(self) -> bool:
        """Return whether it still is; see `ModulePlace.is_kept`."""
        return self.place.module._parameters.get("weight") is self.parameter and self.place.is_kept()


class UsedPlaces:
    """Asks for many tables at once whether the model still uses them, by one look at each link and each weight."""

    def __init__(self, checks: Iterable[Callable[[], bool]]) -> None:
        """Watch the tables with these checks: places, or any functions that return whether one table is in use."""
        self._checks = list(dict.fromkeys(checks))  # the tables of one module share theirs
        self._note()

    def are_in_use(self) -> bool:
        """Return whether all are; only if a link has changed does it call the checks of places."""
        children = [children.get(name) for children, name in self._names]
        weights = [module._parameters.get("weight") for module in self._modules]
        if all(map(is_, children, self._children)) and all(map(is_, weights, self._weights)):
            return all(check() for check in self._others)
        are_in_use = all([check() for check in self._checks])
        self._note()  # a check may have found another path to its module
        return are_in_use

    def _note(self) -> None:
        weights = [check for check in self._checks if isinstance(check, WeightPlace)]
        places = [*(each.place for each in weights), *(each for each in self._checks if isinstance(each, ModulePlace))]
        links = {(id(link[0]), link[1], id(link[2])): link for place in places for link in place.links}
        self._names = [(children, name) for children, name, _ in links.values()]
        self._children = [child for _, _, child in links.values()]
        self._modules = [each.place.module for each in weights]
        self._weights = [each.parameter for each in weights]
        self._others = [check for check in self._checks if not isinstance(check, WeightPlace | ModulePlace)]


def _paths(model: nn.Module) -> Iterator[tuple[nn.Module, list[_Link]]]:
    """Yield each module of a model with the links from the top to it."""
    seen = {model}
    waiting: list[tuple[nn.Module, list[_Link]]] = [(model, [])]
    while waiting:
        parent, links = waiting.pop()
        yield parent, links
        for name, child in parent._modules.items():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append((child, [*links, (parent._modules, name, child)]))
