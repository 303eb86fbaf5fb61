"""How a replica's identities begin: from the stores of a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from headrace.paramserver.replica.identity_map import IdentityMap
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.row_store import RowStore
from headrace.schemas.row_keys import decode_row_ids, key_prefix

__all__ = ["load_identities"]

_ROWS_AT_ONCE = 8192


def load_identities(store: RowStore, table: Table, target: IdentityMap, *, check_wanted: Callable[[], None]) -> None:
    """Take the identities of the rows that a shard's store has.

    Args:
        store: Open; nobody writes to it.
        table: As the store numbers it.
        target: Of that table.
        check_wanted: Called every some thousand rows; what it raises ends it.

    Raises:
        CorruptionError: A record cannot be read.
        StorageError: The disk failed.

    Thread: any; it blocks, some microseconds a row.
    """
    for shard in store.layouts(table.table_id):
        layout = table.layout_of(shard)
        pairs = store.scan(key_prefix(table.table_id, shard))
        while chunk := list(islice(pairs, _ROWS_AT_ONCE)):
            check_wanted()
            records, presence = layout.decode([value for _, value in chunk])
            row_ids = decode_row_ids([key for key, _ in chunk])
            target.load(row_ids, records["identity"], presence, records["epoch"], records["step"], shard)
