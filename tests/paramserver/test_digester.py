"""How a digest reads rows: no more of the tables behind a small one than it must. See also `test_verify.py`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headrace.paramserver.digester import _Stream
from headrace.paramserver.row_reader import ShardSource
from headrace.schemas.row_keys import encode_keys, key_prefix
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=100_000, dim=1, dtype=DType.FLOAT32)
SOURCE = ShardSource(RecordLayout(SPEC, SPEC.whole), None, True)


@pytest.mark.parametrize(
    ("num_rows", "end_row", "most"), [(10, 100, 64), (0, 100, 64), (64, 100, 192), (5000, 3000, 4032)]
)
def test_little_is_read_for_nothing(num_rows: int, end_row: int, most: int) -> None:
    """Every row of the table comes, up to the end that was asked for, and of what lies behind few."""
    keys = [
        bytes(key)
        for table in (1, 2)
        for key in encode_keys(table, SPEC.whole, np.arange(num_rows if table == 1 else 9000))
    ]
    num_read = 0

    def pairs() -> Iterator[tuple[bytes, bytes]]:
        nonlocal num_read
        for key in keys:
            num_read += 1
            yield key, b""

    stream = _Stream(pairs(), key_prefix(1, SPEC.whole), end_row, SOURCE)
    found: list[int] = []
    while stream.fill():
        ids, held = stream.take_up_to(stream.last_row)
        assert len(held) == ids.size
        found += ids.tolist()
    assert found == list(range(min(num_rows, end_row)))
    assert num_read <= most
