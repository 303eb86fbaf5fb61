"""Headrace streams embedding-table updates from PyTorch trainers to a sharded parameter server.

The public names are loaded when they are first used: `import headrace` costs nothing, and works on a server
where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.paramserver.replica import EmbeddingReplica, ReplicaConfig, ReplicaEmbeddingBagCollection
    from headrace.schemas.errors import HeadraceError
    from headrace.streamer import RawEmbeddingStreamer

__all__ = [
    "EmbeddingReplica",
    "HeadraceError",
    "RawEmbeddingStreamer",
    "ReplicaConfig",
    "ReplicaEmbeddingBagCollection",
    "__version__",
]

__version__ = "0.1.0"

_HOME_BY_NAME = {
    "EmbeddingReplica": "headrace.paramserver.replica",
    "HeadraceError": "headrace.schemas.errors",
    "RawEmbeddingStreamer": "headrace.streamer",
    "ReplicaConfig": "headrace.paramserver.replica",
    "ReplicaEmbeddingBagCollection": "headrace.paramserver.replica",
}


def __getattr__(name: str) -> Any:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
