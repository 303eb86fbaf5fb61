"""Batches that assign identities to rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from row_batches import SPEC, make_batch, make_delta

from headrace.paramserver.store.deltas import Batch, RowDelta
from headrace.schemas.tables import ColumnShard


def assign(
    seq: int,
    identity_of: dict[int, int],
    *,
    deleted: Sequence[int] = (),
    version: tuple[int, int] | None = None,
    shards: Sequence[ColumnShard] = (SPEC.whole,),
) -> Batch:
    """Return a batch that writes rows with identities."""
    return make_batch(
        seq,
        version=version,
        deltas=tuple(delta_of(identity_of, seq, deleted, shard) for shard in shards),
    )


def delta_of(identity_of: dict[int, int], tag: int, deleted: Sequence[int], shard: ColumnShard) -> RowDelta:
    delta = make_delta(identity_of, tag, deleted=deleted, shard=shard)
    return dataclasses.replace(delta, identities=np.array(list(identity_of.values()), np.int64))
