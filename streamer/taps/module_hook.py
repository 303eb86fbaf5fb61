"""Hooks on a module that a copy of the module does not carry on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ModuleHook"]


class ModuleHook:
    """A hook that does nothing in a deep copy or a pickle of its module.

    A module keeps its hooks in its `__dict__`, so a plain function there would be copied with it: a copied model (an
    average of weights, a snapshot for evaluation) would mark rows of the tap's tables, and pickling would take the
    whole streamer along.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap `function`, called with the hook's arguments; what it returns is passed on.

        A compiled module calls it too, outside of its graphs: what it reads and writes is in none.
        """
        self._function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    @property
    def __name__(self) -> str:
        """Say why a module with this hook is not scripted: `torch.jit.script` asks for the name of each hook."""
        raise AttributeError(
            "a streamed module, or a copy of one, has hooks that torch.jit.script cannot compile: script the model "
            "before attach() or after the streamer's close()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        """Return a hook that does nothing."""
        return ModuleHook(_do_nothing)

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[Callable[..., None]]]:
        """Pickle as a hook that does nothing."""
        return ModuleHook, (_do_nothing,)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for the hook's function in a copy."""
