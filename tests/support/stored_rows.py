"""What a server has of a table, for tests that run no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np

from headrace.paramserver.reading.reader import EmbeddingReader, Rows

__all__ = ["read_rows", "read_tables"]


def read_rows(
    address: str, fqn: str, row_ids: Iterable[int] | None = None, *, model: str | None = None, **options: Any
) -> Rows:
    """Return rows of a server or of a replica's process: by default all, of a table whose ids are not virtual."""

    async def read() -> Rows:
        async with await EmbeddingReader.connect(address, model=model, timeout_s=60.0) as reader:
            ids = np.arange(reader.tables[fqn].num_rows) if row_ids is None else np.array(list(row_ids), np.int64)
            return await reader.get(fqn, ids, **options)

    return asyncio.run(read())


def read_tables(address: str, fqns: Iterable[str], **options: Any) -> dict[str, Rows]:
    """Return all rows of some tables, over one connection."""

    async def read() -> dict[str, Rows]:
        async with await EmbeddingReader.connect(address, timeout_s=60.0) as reader:
            return {fqn: await reader.get(fqn, np.arange(reader.tables[fqn].num_rows), **options) for fqn in fqns}

    return asyncio.run(read())
