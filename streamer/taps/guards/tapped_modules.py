"""Remember which modules are streamed, to refuse a second tap, and detect modules that were replaced."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from torch import nn

from headrace.schemas.errors import UnsupportedModelError

__all__ = ["ModulePlace", "ModulePlaces", "add_tapped", "check_untapped", "remove_tapped"]

# Modules whose tables are tapped, of all streamers.
_tapped_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_untapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules, given with their paths, that are tapped: a second tap would stream everything twice."""
    for path, module in modules:
        if module in _tapped_modules:
            raise UnsupportedModelError(
                f"module {path or type(module).__name__!r} is streamed already, by this streamer or another: close() "
                f"that one first; in a notebook that has lost it, create the model and its optimizer again"
            )


def add_tapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Record that modules are tapped."""
    _tapped_modules.update(module for _, module in modules)


def remove_tapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Record that modules are no longer tapped."""
    _tapped_modules.difference_update(module for _, module in modules)


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
        self._model, self._module, self._links = model, module, links

    def is_kept(self) -> bool:
        """Return whether no other module is in this one's place; True for a module that was removed.

        Looks at each module on the path. If one was wrapped since, searches the model once.
        """
        if all(children.get(name) is child for children, name, child in self._links):
            return True
        links = next((links for module, links in _paths(self._model) if module is self._module), None)
        if links is not None:
            self._links = links
            return True
        return any(children.get(name) is None for children, name, _ in self._links)


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
