"""Which modules are streamed: a second tap on one would stream everything twice."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from headrace.schemas.errors import UnsupportedModelError

__all__ = ["add_tapped", "check_untapped", "remove_tapped"]

# Those that hold tapped tables, of all streamers.
_tapped_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def check_untapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Check that nothing streams the modules yet.

    Args:
        modules: With their paths, for the message.

    Raises:
        UnsupportedModelError: One is streamed.
    """
    for path, module in modules:
        if module in _tapped_modules:
            raise UnsupportedModelError(
                f"module {path or type(module).__name__!r} is streamed already, by this streamer or another: "
                f"close() that one first; in a notebook that has lost it, make the model and its optimizer anew"
            )


def add_tapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Note that modules are streamed from now on."""
    _tapped_modules.update(module for _, module in modules)


def remove_tapped(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Note that they are not any more."""
    _tapped_modules.difference_update(module for _, module in modules)
