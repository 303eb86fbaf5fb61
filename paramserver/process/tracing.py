"""OpenTelemetry spans, if its package is there (the extra `otel`); else nothing, at no cost worth naming.

Which spans are recorded and where they go is up to the program's own set-up. A shard is a process of its own: what sets
OpenTelemetry up must reach it through the environment.
"""

from __future__ import annotations

import contextlib
import importlib
from contextlib import AbstractContextManager
from types import ModuleType

_trace: ModuleType | None
try:
    _trace = importlib.import_module("opentelemetry.trace")
except ImportError:
    _trace = None

__all__ = ["span"]

_NO_SPAN: AbstractContextManager[object] = contextlib.nullcontext()


def span(name: str, **attributes: str | int | float | bool) -> AbstractContextManager[object]:
    """Return a context manager that is a span while it lasts, inside the one that lasts already; errors are noted.

    Args:
        name: Such as `headrace.flush`.
        attributes: What it is of: numbers and names, no rows and no secrets.

    Thread: any.
    """
    if _trace is None:
        return _NO_SPAN
    names = {f"headrace.{key}": value for key, value in attributes.items()}
    made: AbstractContextManager[object] = _trace.get_tracer("headrace").start_as_current_span(name, attributes=names)
    return made
