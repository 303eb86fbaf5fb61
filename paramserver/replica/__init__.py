"""Serving processes: copies of the tables that follow the server. The one part of `paramserver` that needs torch."""

from __future__ import annotations

from headrace.paramserver.replica.api.bags import BagTable, ReplicaEmbeddingBagCollection
from headrace.paramserver.replica.api.config import DiskStorage, MemoryStorage, ReplicaConfig
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica

__all__ = [
    "BagTable",
    "DiskStorage",
    "EmbeddingReplica",
    "MemoryStorage",
    "ReplicaConfig",
    "ReplicaEmbeddingBagCollection",
]
