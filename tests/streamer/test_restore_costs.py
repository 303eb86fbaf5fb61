"""What reading and sending costs is measured on all ranks, and ranks of a host count as equally fast."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from thread_ranks import Ranks

from headrace.paramserver.reading.reader import Rows
from headrace.schemas.row_records import PRESENT
from headrace.schemas.tables import ColumnShard, DType, TableSpec
from headrace.streamer.read_plan import ReadCosts, RowBox
from headrace.streamer.restore_costs import measure_costs

SPECS = {
    name: TableSpec(fqn=name, num_rows=rows, dim=16, dtype=DType.FLOAT32, states=())
    for name, rows in (("t", 5000), ("u", 3))
}
WHOLE = ColumnShard(offset=0, width=16)


def read(reads: Any, take: Any) -> None:
    """Make up whole rows."""
    for each in reads:
        ids = np.arange(each.first_row, each.end_row)
        values = np.zeros((ids.size, 16), "<f4")
        take(
            each,
            Rows(
                row_ids=ids,
                presence=np.full(ids.size, PRESENT, np.uint8),
                weights=values,
                states={},
                epochs=ids,
                steps=ids,
                times_us=None,
                identities=None,
            ),
        )


def measured(hosts: list[str], boxes: list[list[RowBox]]) -> ReadCosts:
    """Measure on threads; all ranks must find the same."""
    found = Ranks(len(hosts)).run(lambda world: measure_costs(world, read, boxes, SPECS, hosts=hosts))
    assert all(each == found[0] for each in found), found
    costs = found[0]
    assert isinstance(costs, ReadCosts)
    return costs


def test_costs_on_two_hosts() -> None:
    """Ranks of a host have the same costs, all links have some, also those of a rank that holds nothing."""
    one = RowBox(name="t", first_row=0, end_row=5000, columns=WHOLE)
    costs = measured(["a", "b", "a"], [[one], [RowBox(name="u", first_row=0, end_row=3, columns=WHOLE)], []])
    assert costs.read[0] == costs.read[2] and costs.request_s[0] == costs.request_s[2]
    assert costs.send[0][2] == costs.send[2][0] > 0
    assert costs.send[0][1] == costs.send[1][0] == costs.send[2][1] > 0
    assert all(map(math.isfinite, (costs.start_s, costs.store, *costs.read, *costs.request_s)))


def test_costs_of_a_table_of_one_row() -> None:
    """The smallest sample is measured too, also by one rank alone."""
    row = RowBox(name="u", first_row=0, end_row=1, columns=WHOLE)
    for hosts in (["a"], ["a", "b"]):
        costs = measured(hosts, [[row], *([] for _ in hosts[1:])])
        assert min(*costs.read, costs.store, *costs.request_s) >= 0
