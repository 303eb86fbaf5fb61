"""Functions of modules that need a library of an extra: loaded when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from headrace.schemas.errors import ConfigError

__all__ = ["import_with_extra"]

# Library: the extra that brings it.
_EXTRAS = {"torch": "torch", "pyarrow": "tools", "safetensors": "tools"}


def import_with_extra(function: str, *, what: str) -> Callable[..., Any]:
    """Return a function.

    Args:
        function: `module:function`.
        what: What needs it, for the message.

    Raises:
        ConfigError: A library that only an extra brings is missing.
    """
    module, _, name = function.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as exc:
        library = (exc.name or "").partition(".")[0]
        if library not in _EXTRAS:
            raise
        raise ConfigError(f"{what} needs {library}: pip install 'headrace[{_EXTRAS[library]}]'") from exc
    return found
