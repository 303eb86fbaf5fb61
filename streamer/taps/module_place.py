"""Where modules lie in a model, and whether they lie there still."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["ModulePlace", "ModulePlaces"]

_Link = tuple[dict[str, nn.Module | None], str, nn.Module]


class ModulePlaces:
    """Where the modules of a model lie; a model is walked through once for all of them."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the way from a model to each module in it."""
        self._model = model
        self._links = dict(_ways(model))

    def of(self, module: nn.Module) -> ModulePlace:
        """Return the place of a module of the model."""
        return ModulePlace(self._model, module, self._links.get(module, []))


class ModulePlace:
    """Notices that another module has taken a module's place.

    As a table that is made anew to grow does: what trains then is not what was attached.
    """

    def __init__(self, model: nn.Module, module: nn.Module, links: list[_Link]) -> None:
        """Use `ModulePlaces.of`."""
        self._model, self._module, self._links = model, module, links

    def is_kept(self) -> bool:
        """Return whether no other module is in the place of this one; one that was removed has lost it to nobody.

        Costs a look at each module on the way to it. Where it was wrapped since, it is looked for once.
        """
        if all(children.get(name) is child for children, name, child in self._links):
            return True
        links = next((links for module, links in _ways(self._model) if module is self._module), None)
        if links is not None:
            self._links = links
            return True
        return any(children.get(name) is None for children, name, _ in self._links)


def _ways(model: nn.Module) -> Iterator[tuple[nn.Module, list[_Link]]]:
    """Yield each module of a model with a way to it, as (children, name, child) from the top."""
    seen = {model}
    waiting: list[tuple[nn.Module, list[_Link]]] = [(model, [])]
    while waiting:
        parent, links = waiting.pop()
        yield parent, links
        for name, child in parent._modules.items():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append((child, [*links, (parent._modules, name, child)]))
