"""What is said of each table: types, states and shares."""

from __future__ import annotations

import torch
from trainer_tables import POINTWISE

from headrace.schemas.tables import DType, TableSpec
from headrace.streamer.taps.table_settings import TableSettings
from headrace.streamer.taps.tapped_table import TappedTable


def _table(fqn: str, dtype: DType = DType.FLOAT32) -> TappedTable:
    spec = TableSpec(fqn=fqn, num_rows=9, dim=4, dtype=dtype, states=(POINTWISE,))
    return TappedTable(spec=spec, num_local_rows=9, weights=torch.Tensor, states=dict)


def test_the_first_entry_that_a_table_matches_counts() -> None:
    """Tables that match none are stored whole, with states, and sent whole; so are types that need no rounding."""
    dtypes = {"a": DType.FLOAT32, "b": DType.FLOAT32, "c": DType.INT32, "d": DType.FLOAT16, "other": DType.FLOAT64}
    tables = [_table(name, dtype) for name, dtype in dtypes.items()]
    settings = TableSettings(
        weights_dtype={"b": torch.float16, "[a-d]": torch.bfloat16},
        states={"a": False, "b": True, "[ab]": False},
        send_share={"d": 0.5, "[cd]": 0.25},
    )
    settings.apply(tables, dtypes)
    assert {table.path: (table.spec.dtype, bool(table.spec.states), table.send_share) for table in tables} == {
        "a": (DType.BFLOAT16, False, 1.0),
        "b": (DType.FLOAT16, True, 1.0),
        "c": (DType.INT32, True, 1.0),
        "d": (DType.FLOAT16, True, 0.5),
        "other": (DType.FLOAT64, True, 1.0),
    }
    TableSettings(states=["!a"]).apply(tables := [_table("a"), _table("b")], "ab")
    assert [bool(table.spec.states) for table in tables] == [False, True]
