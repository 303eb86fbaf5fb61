"""What a move's destination takes of the source's rows and records. No I/O.

Both shards hear of new tables, drops and floors, each at its own time. So a record of the source may be of a table that
was dropped here before: its rows are left out. Whoever reads the destination's log later finds the same, because all of
this follows from the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.paramserver.store.catalog import Catalog, unpack_spec
from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.copy_chunks import decode_runs
from headrace.schemas.errors import CorruptionError, SpecMismatchError, UnknownTableError

__all__ = ["known_deltas", "known_hello", "loaded_runs"]


def known_hello(catalog: Catalog, header: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """Return a source's hello of an epoch with what is not older than what the catalog says of the tables.

    Raises:
        SpecMismatchError: A table is another one here, and was not dropped in between.
    """
    drops = catalog.drop_epochs
    tables = [packed for packed in header["tables"] if _is_new(catalog, packed, epoch)]
    names = {table.spec.fqn for table in catalog} | {unpack_spec(packed).fqn for packed in tables}
    owned = []
    for name in names.intersection(header.get("owned", ())):
        owner = catalog.owner_of(name)
        if owner is None or owner.epoch <= epoch:
            owned.append(name)
    return dict(header) | {
        "tables": tables,
        "owned": sorted(owned),
        "fills": {name: step for name, step in header.get("fills", {}).items() if name in names},
        "updated_only": [name for name in header.get("updated_only", ()) if name in names],
        "complete": [name for name in header.get("complete", ()) if name in names],
        "dropped": [name for name in header.get("dropped", ()) if epoch > drops.get(name, 0)],
        "floors": {name: floor for name, floor in header.get("floors", {}).items() if name in names},
    }


def _is_new(catalog: Catalog, packed: Any, epoch: int) -> bool:
    spec = unpack_spec(packed)
    owner = catalog.owner_of(spec.fqn)
    if owner is not None and owner.epoch > epoch:
        (spec,) = catalog.with_known_uses([spec])
    try:
        return bool(catalog.check([spec], epoch=epoch, knows_outgrown=True))
    except UnknownTableError:
        return False
    except SpecMismatchError:
        if catalog.drop_epochs.get(spec.fqn, 0) >= epoch:
            return False  # another one was made here since
        raise


def known_deltas(catalog: Catalog, request: Any) -> list[Any]:
    """Return a source's batch without the tables that were dropped here."""
    # If a table was not dropped, decoding its delta says what is wrong.
    return [delta for delta in request.deltas if delta.fqn not in catalog.drop_epochs or _is_here(catalog, delta)]


def _is_here(catalog: Catalog, delta: Any) -> bool:
    table = catalog.get(delta.fqn)
    return table is not None and delta.fingerprint in (table.spec.fingerprint, *table.earlier)


def loaded_runs(catalog: Catalog, chunk: memoryview) -> tuple[SortedRun, ...]:
    """Return the rows of a chunk with this shard's numbers of tables, without tables that were dropped.

    Raises:
        CorruptionError: The chunk is damaged, or its records are not of the tables' layouts.
    """
    tables = {table.table_id: table for table in catalog}
    runs = []
    for run in decode_runs(chunk):
        if (table := tables.get(run.table_id)) is None:
            continue
        layout = table.layout_of(run.shard)
        if run.records.itemsize != layout.dtype.itemsize:
            raise CorruptionError(f"table {table.spec.fqn!r}: copied records of {run.records.itemsize} bytes")
        runs.append(SortedRun(table.table_id, layout, run.ids, run.records.view(layout.dtype), None))
    return tuple(runs)
