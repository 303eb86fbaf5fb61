"""Headrace streams embedding-table updates from PyTorch trainers to a sharded parameter server.

Public names are imported on first use, so `import headrace` is cheap and works on a server without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.paramserver.reading.blocking_reader import BlockingReader
    from headrace.paramserver.reading.dense_parts import DensePart
    from headrace.paramserver.reading.reader import EmbeddingReader
    from headrace.paramserver.reading.table_admin import TableAdmin
    from headrace.paramserver.replica import (
        DenseParameters,
        DiskStorage,
        EmbeddingReplica,
        MemoryStorage,
        RecordingCheck,
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
    from headrace.schemas.errors import (
        ConfigError,
        CorruptionError,
        FencedError,
        GoneError,
        HeadraceError,
        InvariantError,
        LogFencedError,
        NonFiniteError,
        OverloadedError,
        OwnedError,
        ProtocolError,
        ProtocolMismatchError,
        RequestError,
        ReshardedError,
        RowRangeError,
        SequenceGapError,
        SetBackError,
        SpecMismatchError,
        StorageError,
        UnauthorizedError,
        UnavailableError,
        UnknownTableError,
        UnsupportedModelError,
    )
    from headrace.streamer import RawEmbeddingStreamer, SourceRows, StreamerConfig, TableSource, detach
    from headrace.streamer.restore import restore

__all__ = [
    "BlockingReader",
    "ConfigError",
    "CorruptionError",
    "DenseParameters",
    "DensePart",
    "DiskStorage",
    "EmbeddingReader",
    "EmbeddingReplica",
    "FencedError",
    "GoneError",
    "HeadraceError",
    "InvariantError",
    "LogFencedError",
    "MemoryStorage",
    "NonFiniteError",
    "OverloadedError",
    "OwnedError",
    "ProtocolError",
    "ProtocolMismatchError",
    "RawEmbeddingStreamer",
    "RecordingCheck",
    "ReplicaConfig",
    "ReplicaEmbedding",
    "ReplicaEmbeddingBag",
    "ReplicaEmbeddingBagCollection",
    "ReplicaEmbeddingCollection",
    "ReplicaManagedCollisionCollection",
    "RequestError",
    "ReshardedError",
    "RowRangeError",
    "SequenceGapError",
    "ServerProcess",
    "SetBackError",
    "SourceRows",
    "SpecMismatchError",
    "StorageError",
    "StreamerConfig",
    "TableAdmin",
    "TableSource",
    "UnauthorizedError",
    "UnavailableError",
    "UnknownTableError",
    "UnsupportedModelError",
    "__version__",
    "client_tls_context",
    "detach",
    "load_token",
    "restore",
    "serve_model",
]

__version__ = "0.3.0"

_HOME_BY_NAME = {
    "BlockingReader": "headrace.paramserver.reading.blocking_reader",
    "DenseParameters": "headrace.paramserver.replica",
    "DensePart": "headrace.paramserver.reading.dense_parts",
    "DiskStorage": "headrace.paramserver.replica",
    "EmbeddingReader": "headrace.paramserver.reading.reader",
    "EmbeddingReplica": "headrace.paramserver.replica",
    "MemoryStorage": "headrace.paramserver.replica",
    "RawEmbeddingStreamer": "headrace.streamer",
    "RecordingCheck": "headrace.paramserver.replica",
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
    "detach": "headrace.streamer",
    "load_token": "headrace.paramserver.rpc.security",
    "restore": "headrace.streamer.restore",
    "serve_model": "headrace.paramserver.replica",
}


def __getattr__(name: str) -> Any:
    home = "headrace.schemas.errors" if name in __all__ and name.endswith("Error") else _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        from headrace.schemas.extras import install_command

        raise ImportError(f"headrace.{name} needs PyTorch: {install_command('torch')}", name="torch") from exc
    globals()[name] = value  # later uses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
