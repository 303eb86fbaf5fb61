"""OpenTelemetry spans if the package is installed (extra `otel`); otherwise no-ops that cost nothing.

The program's own OpenTelemetry setup decides what is recorded and where it goes. A shard is a process of its own, so
the setup must reach it through the environment.
"""

from __future__ import annotations

import contextlib
import importlib
from contextlib import AbstractContextManager
from types import ModuleType

__all__ = ["span"]

_trace: ModuleType | None
try:
    _trace = importlib.import_module("opentelemetry.trace")
except ImportError:
    _trace = None

_NO_SPAN: AbstractContextManager[object] = contextlib.nullcontext()


def span(name: str, **attributes: str | int | float | bool) -> AbstractContextManager[object]:
    """Return a context manager that records a span, nested in the current one, with any error.

    Args:
        name: Such as `headrace.flush`.
        attributes: Numbers and names; no rows and no secrets.

    Thread: any.
    """
    if _trace is None:
        return _NO_SPAN
    names = {f"headrace.{key}": value for key, value in attributes.items()}
    made: AbstractContextManager[object] = _trace.get_tracer("headrace").start_as_current_span(name, attributes=names)
    return made
