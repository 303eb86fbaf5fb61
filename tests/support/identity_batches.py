"""Batches that assign identities to rows, and a dict that knows which row has which."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from row_batches import SPEC, make_batch, make_delta

from headrace.paramserver.store.deltas import Batch, RowDelta
from headrace.paramserver.store.identity_index import FoundRows
from headrace.schemas.row_records import NO_IDENTITY
from headrace.schemas.tables import ColumnShard


def assign(
    seq: int,
    identity_of: dict[int, int],
    *,
    deleted: Sequence[int] = (),
    version: tuple[int, int] | None = None,
    is_conditional: bool = False,
    shards: Sequence[ColumnShard] = (SPEC.whole,),
) -> Batch:
    """Return a batch that writes rows with identities."""
    return make_batch(
        seq,
        version=version,
        is_conditional=is_conditional,
        deltas=tuple(delta_of(identity_of, seq, deleted, shard) for shard in shards),
    )


def delta_of(identity_of: dict[int, int], tag: int, deleted: Sequence[int], shard: ColumnShard) -> RowDelta:
    delta = make_delta(identity_of, tag, deleted=deleted, shard=shard)
    return dataclasses.replace(delta, identities=np.array(list(identity_of.values()), np.int64))


class IdentityModel:
    """The row of each identity, in the plainest way."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[tuple[int, int], int | None]] = {}
        self.claims: dict[int, tuple[tuple[int, int], int]] = {}

    def apply(self, batch: Batch) -> None:
        version = (batch.epoch, batch.step)

        def counts(known: tuple[tuple[int, int], Any] | None) -> bool:
            return not batch.is_conditional or known is None or version >= known[0]

        for delta in batch.deltas:
            assert delta.identities is not None
            for row, identity in zip(delta.row_ids.tolist(), delta.identities.tolist(), strict=True):
                if counts(self.rows.get(row)):
                    self.rows[row] = (version, identity)
                if identity != NO_IDENTITY and counts(self.claims.get(identity)):
                    self.claims[identity] = (version, row)
            for row in [] if delta.deleted_row_ids is None else delta.deleted_row_ids.tolist():
                if counts(self.rows.get(row)):
                    self.rows[row] = (version, None)

    def row_of(self, identity: int) -> int:
        _, row = self.claims.get(identity, (None, -1))
        return row if row >= 0 and self.rows[row][1] == identity else -1

    def check(self, found: FoundRows, identities: Sequence[int]) -> None:
        assert found.row_ids.tolist() == [self.row_of(identity) for identity in identities]
        versions = [self.claims.get(identity, ((0, 0), -1))[0] for identity in identities]
        assert list(zip(found.epochs.tolist(), found.steps.tolist(), strict=True)) == versions
