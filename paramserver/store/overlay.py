"""The overlay of a store: every acked row that RocksDB does not have yet, by table and column shard, and its claims."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.paramserver.store.identity_index import claims_of
from headrace.paramserver.store.pending import Batch, Part, PendingRows
from headrace.paramserver.store.row_reader import ShardSource
from headrace.schemas.identity_claims import CLAIMS
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import ColumnShard, TableSpec

__all__ = ["Overlay"]


class Overlay:
    """What pends of all tables.

    Thread: the loop's; what it returns of sources may be used in any.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rows: dict[int, dict[ColumnShard, PendingRows]] = {}
        self._claims: dict[int, PendingRows] = {}  # of tables with identities

    def add(self, batch: Batch) -> list[tuple[PendingRows, Part]]:
        """Let a batch be read; return where each of its parts pends, and it."""
        parts: list[tuple[PendingRows, Part]] = []
        for delta in batch.deltas:
            part = Part.of_delta(delta, batch)
            if part.ids.size:
                parts.append((self._rows_of(delta.table_id, delta.layout), part))
            if (claims := claims_of(delta, batch)) is not None:
                parts.append((self._claims_in(delta.table_id), claims))
        for rows, part in parts:
            rows.add(part)
        return parts

    def sources_of(self, table_id: int, spec: TableSpec, stored: Iterable[ColumnShard]) -> list[ShardSource]:
        """Return where the rows of a table are, each column shard once, as of this moment.

        Args:
            table_id: Number of the table.
            spec: What the table is.
            stored: Column shards that RocksDB may have rows of.
        """
        pending = self._rows.get(table_id, {})
        shards = dict.fromkeys(stored, True)
        for shard in pending:
            shards.setdefault(shard, False)
        sources = []
        for shard in shards or {spec.whole: False}:
            rows = pending.get(shard)
            layout = rows.layout if rows else RecordLayout(spec, shard)
            # One that is being applied for the first time may get into RocksDB after this: the snapshot has its rows.
            sources.append(ShardSource(layout, rows.snapshot() if rows else None, shards.get(shard, False)))
        return sources

    def claims_source(self, table_id: int) -> ShardSource:
        """Return where the claims of a table's identities are, as of this moment."""
        return ShardSource(CLAIMS, self._claims_in(table_id).snapshot(), True)

    def _rows_of(self, table_id: int, layout: RecordLayout) -> PendingRows:
        of_table = self._rows.setdefault(table_id, {})
        rows = of_table.get(layout.shard)
        if rows is None:
            rows = of_table[layout.shard] = PendingRows(table_id, layout)
        return rows

    def _claims_in(self, table_id: int) -> PendingRows:
        rows = self._claims.get(table_id)
        if rows is None:
            rows = self._claims[table_id] = PendingRows(table_id, CLAIMS)
        return rows
