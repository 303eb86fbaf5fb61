"""Headrace streams embedding-table updates from PyTorch trainers to a sharded parameter server.

Public names are imported on first use, so `import headrace` is cheap and works on a server without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.paramserver.reading.dense_parts import DensePart
    from headrace.paramserver.reading.reader import EmbeddingReader
    from headrace.paramserver.reading.table_admin import TableAdmin
    from headrace.paramserver.replica import (
        DenseParameters,
        DiskStorage,
        EmbeddingReplica,
        MemoryStorage,
        ReplicaConfig,
        ReplicaEmbedding,
        ReplicaEmbeddingBag,
        ReplicaEmbeddingBagCollection,
        ReplicaEmbeddingCollection,
        ReplicaManagedCollisionCollection,
        serve_model,
    )
    from headrace.paramserver.rpc.security import client_tls_context, load_token
    from headrace.paramserver.shard.launch import ServerProcess
    from headrace.schemas.errors import HeadraceError
    from headrace.streamer import RawEmbeddingStreamer, SourceRows, StreamerConfig, TableSource
    from headrace.streamer.restore import restore

__all__ = [
    "DenseParameters",
    "DensePart",
    "DiskStorage",
    "EmbeddingReader",
    "EmbeddingReplica",
    "HeadraceError",
    "MemoryStorage",
    "RawEmbeddingStreamer",
    "ReplicaConfig",
    "ReplicaEmbedding",
    "ReplicaEmbeddingBag",
    "ReplicaEmbeddingBagCollection",
    "ReplicaEmbeddingCollection",
    "ReplicaManagedCollisionCollection",
    "ServerProcess",
    "SourceRows",
    "StreamerConfig",
    "TableAdmin",
    "TableSource",
    "__version__",
    "client_tls_context",
    "load_token",
    "restore",
    "serve_model",
]

__version__ = "0.1.0"

_HOME_BY_NAME = {
    "DenseParameters": "headrace.paramserver.replica",
    "DensePart": "headrace.paramserver.reading.dense_parts",
    "DiskStorage": "headrace.paramserver.replica",
    "EmbeddingReader": "headrace.paramserver.reading.reader",
    "EmbeddingReplica": "headrace.paramserver.replica",
    "HeadraceError": "headrace.schemas.errors",
    "MemoryStorage": "headrace.paramserver.replica",
    "RawEmbeddingStreamer": "headrace.streamer",
    "ReplicaConfig": "headrace.paramserver.replica",
    "ReplicaEmbedding": "headrace.paramserver.replica",
    "ReplicaEmbeddingBag": "headrace.paramserver.replica",
    "ReplicaEmbeddingBagCollection": "headrace.paramserver.replica",
    "ReplicaEmbeddingCollection": "headrace.paramserver.replica",
    "ReplicaManagedCollisionCollection": "headrace.paramserver.replica",
    "ServerProcess": "headrace.paramserver.shard.launch",
    "SourceRows": "headrace.streamer",
    "StreamerConfig": "headrace.streamer",
    "TableAdmin": "headrace.paramserver.reading.table_admin",
    "TableSource": "headrace.streamer",
    "client_tls_context": "headrace.paramserver.rpc.security",
    "load_token": "headrace.paramserver.rpc.security",
    "restore": "headrace.streamer.restore",
    "serve_model": "headrace.paramserver.replica",
}


def __getattr__(name: str) -> Any:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise ImportError(f"headrace.{name} needs PyTorch: pip install 'headrace[torch]'", name="torch") from exc
    globals()[name] = value  # later uses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
