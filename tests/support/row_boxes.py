"""Rows and columns of two small tables, as ranks may hold them: strategies for plans and reads of a restore."""

from __future__ import annotations

from hypothesis import strategies as st

from headrace.schemas.tables import ColumnShard
from headrace.streamer.read_plan import RowBox

__all__ = ["BOXES", "COLUMNS", "WORLDS"]

COLUMNS = [(0, 6), (0, 2), (2, 5), (5, 6)]
BOXES = st.builds(
    lambda name, rows, columns: RowBox(
        name=name,
        first_row=min(rows),
        end_row=max(rows),
        columns=ColumnShard(offset=min(columns), width=max(columns) - min(columns)),
    ),
    st.sampled_from("tu"),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.sampled_from(COLUMNS),
)
WORLDS = st.lists(st.lists(BOXES, max_size=4), min_size=1, max_size=5)
"""By rank what it holds, of tables `t` and `u` with 40 rows of 6 columns."""
