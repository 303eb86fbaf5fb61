"""Serving processes: copies of the tables that follow the server. Only `api/`, which returns tensors, needs torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.paramserver.replica.api.collisions import ReplicaManagedCollisionCollection
    from headrace.paramserver.replica.api.config import DiskStorage, MemoryStorage, ReplicaConfig
    from headrace.paramserver.replica.api.embedding_collections import (
        BagTable,
        EmbeddingTable,
        ReplicaEmbeddingBagCollection,
        ReplicaEmbeddingCollection,
    )
    from headrace.paramserver.replica.api.embedding_replica import DenseParameters, EmbeddingReplica
    from headrace.paramserver.replica.api.embeddings import ReplicaEmbedding, ReplicaEmbeddingBag
    from headrace.paramserver.replica.api.recording_check import RecordingCheck, RecordingReport
    from headrace.paramserver.replica.api.served_model import serve_model

__all__ = [
    "BagTable",
    "DenseParameters",
    "DiskStorage",
    "EmbeddingReplica",
    "EmbeddingTable",
    "MemoryStorage",
    "RecordingCheck",
    "RecordingReport",
    "ReplicaConfig",
    "ReplicaEmbedding",
    "ReplicaEmbeddingBag",
    "ReplicaEmbeddingBagCollection",
    "ReplicaEmbeddingCollection",
    "ReplicaManagedCollisionCollection",
    "serve_model",
]

_HOME_BY_NAME = {
    "BagTable": "embedding_collections",
    "DenseParameters": "embedding_replica",
    "DiskStorage": "config",
    "EmbeddingReplica": "embedding_replica",
    "EmbeddingTable": "embedding_collections",
    "MemoryStorage": "config",
    "RecordingCheck": "recording_check",
    "RecordingReport": "recording_check",
    "ReplicaConfig": "config",
    "ReplicaEmbedding": "embeddings",
    "ReplicaEmbeddingBag": "embeddings",
    "ReplicaEmbeddingBagCollection": "embedding_collections",
    "ReplicaEmbeddingCollection": "embedding_collections",
    "ReplicaManagedCollisionCollection": "collisions",
    "serve_model": "served_model",
}


def __getattr__(name: str) -> Any:
    # On first use: the serving process imports modules of this package where torch is not installed.
    if (home := _HOME_BY_NAME.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.api.{home}"), name)
