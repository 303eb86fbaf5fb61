"""A server in one JSON object, which the status page draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.paramserver.metrics.metrics_families import ShardState
from headrace.paramserver.metrics.metrics_sample import ShardSample, TableSample, WriterSample

__all__ = ["merge_tables", "merge_writers", "status_document"]


def merge_tables(samples: Iterable[ShardSample]) -> list[TableSample]:
    """Return each table with its rows on all shards, by name; estimates, but never more than the table has."""
    merged: dict[str, TableSample] = {}
    for table in (table for sample in samples for table in sample.tables):
        known = merged.get(table.fqn)
        rows = table.num_rows_estimate + (known.num_rows_estimate if known else 0)
        merged[table.fqn] = dataclasses.replace(table, num_rows_estimate=min(rows, table.num_rows or rows))
    return [merged[fqn] for fqn in sorted(merged)]


def merge_writers(samples: Iterable[ShardSample]) -> list[WriterSample]:
    """Return each writer as all shards together see it: its step is the one that every shard has."""
    merged: dict[tuple[str, str, int], WriterSample] = {}
    for writer in (writer for sample in samples for writer in sample.writers):
        key = (writer.run, writer.client, writer.epoch)
        known = merged.get(key, writer)
        is_connected = known.is_connected or writer.is_connected
        merged[key] = dataclasses.replace(writer, step=min(known.step, writer.step), is_connected=is_connected)
    return [merged[key] for key in sorted(merged)]


def status_document(states: Sequence[ShardState]) -> dict[str, Any]:
    """Return a server as `json` can write it.

    Args:
        states: Of its shards.
    """
    samples = [state.sample for state in states if state.sample is not None]
    detail = next((sample.detail for sample in samples if sample.detail is not None), None)
    return {
        "server_id": samples[0].server_id if samples else None,
        "version": samples[0].version if samples else None,
        "shards": [_shard(state) for state in states],
        "tables": [dataclasses.asdict(table) for table in merge_tables(samples)],
        "writers": [dataclasses.asdict(writer) for writer in merge_writers(samples)],
        "snapshot": dataclasses.asdict(detail.snapshot) if detail is not None and detail.snapshot is not None else None,
    }


def _shard(state: ShardState) -> dict[str, Any]:
    told = state.sample.to_json() if state.sample is not None else {}
    for name in ("tables", "writers", "server_id", "version", "num_shards", "shard"):
        told.pop(name, None)
    return {
        "shard": state.shard,
        "address": state.address,
        "error": state.error,
        "num_restarts": state.num_restarts,
        **told,
    }
