"""Where a module lies in a model, and whether it lies there still."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["ModulePlace"]

_Link = tuple[dict[str, nn.Module | None], str, nn.Module]


class ModulePlace:
    """Notices that another module has taken a module's place.

    As a table that is made anew to grow does: what trains then is not what was attached.
    """

    def __init__(self, model: nn.Module, module: nn.Module) -> None:
        """Remember the way from a model to a module in it."""
        self._model, self._module = model, module
        self._links = next(_ways(model, module), [])

    def is_kept(self) -> bool:
        """Return whether no other module is in the place of this one; one that was removed has lost it to nobody.

        Costs a look at each module on the way to it. Where it was wrapped since, it is looked for once.
        """
        if all(children.get(name) is child for children, name, child in self._links):
            return True
        links = next(_ways(self._model, self._module), None)
        if links is not None:
            self._links = links
            return True
        return any(children.get(name) is None for children, name, _ in self._links)


def _ways(model: nn.Module, module: nn.Module) -> Iterator[list[_Link]]:
    """Yield the ways from a model to a module, as (children, name, child) from the top."""
    seen: set[nn.Module] = set()

    def search(parent: nn.Module, links: list[_Link]) -> Iterator[list[_Link]]:
        if parent is module:
            yield links
        elif parent not in seen:
            seen.add(parent)
            for name, child in parent._modules.items():
                if child is not None:
                    yield from search(child, [*links, (parent._modules, name, child)])

    yield from search(model, [])
