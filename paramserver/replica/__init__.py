"""Serving processes: copies of the tables that follow the server. The one part of `paramserver` that needs torch."""

from __future__ import annotations

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
from headrace.paramserver.replica.api.served_model import serve_model

__all__ = [
    "BagTable",
    "DenseParameters",
    "DiskStorage",
    "EmbeddingReplica",
    "EmbeddingTable",
    "MemoryStorage",
    "ReplicaConfig",
    "ReplicaEmbedding",
    "ReplicaEmbeddingBag",
    "ReplicaEmbeddingBagCollection",
    "ReplicaEmbeddingCollection",
    "ReplicaManagedCollisionCollection",
    "serve_model",
]
