"""The operations in a compiled function: traced whole, without a break, to the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_inputs import poisoned
from torch.fx.experimental.proxy_tensor import make_fx

from headrace.kernels import bucketize, digests, dirty_bitmap, dirty_drain, packing, quantization
from headrace.kernels.bucketize import block_bucketize
from headrace.kernels.digests import row_digests
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty, mark_dirty_features, take_dirty
from headrace.kernels.dirty_drain import DrainPlan, DrainTable, drain_dirty
from headrace.kernels.packing import pack_rows, unpack_rows
from headrace.kernels.precisions import PRECISIONS
from headrace.kernels.quantization import dequantize, quantize


def _all_operations(
    bitmap: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    mark_dirty(bitmap, ids)
    _, count = take_dirty(bitmap, 2)
    pack_rows([table], [ids], [[table[:, 0]]], out)
    values = table[ids]
    unpack_rows(table, ids, values * 2)
    shards = block_bucketize(ids, 3)
    read = dequantize(quantize(values, "int4"), "int4", 7)
    return count, row_digests(ids, [values]), shards.bounds, shards.positions, read


def test_a_compiled_function_does_the_same() -> None:
    """Results, and what is written into bitmap, table and buffer, are those of the plain function."""
    results = []
    compiled = torch.compile(_all_operations, backend="aot_eager", fullgraph=True)
    for function in (_all_operations, compiled):
        written = (make_bitmap(100), torch.arange(20 * 7.0).reshape(20, 7), poisoned(1024))
        ids = torch.tensor([3, 0, 19, 7])
        results.append((*function(written[0], ids, written[1], written[2]), *written))
    assert all(torch.equal(plain, traced) for plain, traced in zip(*results, strict=True))


_IDS, _FEATURES = torch.tensor([5, -1]), (torch.tensor([0, 2]), torch.tensor([64]), torch.tensor([9]))
_ROWS, _TABLE = torch.randn(3, 5), torch.randn(5, 3)
_PLAN = DrainPlan([DrainTable(first_slot=64, num_rows=70, row_offset=0, seed=1, columns=(torch.randn(70, 4),))], 2)
_WRITTEN = torch.tensor([0]), poisoned(4096), torch.full((_PLAN.header_words,), -1)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (dirty_bitmap._mark_dirty, (make_bitmap(100), _IDS)),
        (dirty_bitmap._mark_dirty_features, (make_bitmap(100), _IDS, *_FEATURES)),
        (dirty_bitmap._mark_dirty_tables, (make_bitmap(100), [_IDS, torch.tensor([8])], [0, 64], [9, 9])),
        (dirty_bitmap._take_dirty, (torch.full((3,), 5), 4)),
        (bucketize._block_bucketize, (torch.arange(9), 4, 3, 0, torch.randn(9))),
        (bucketize._block_bucketize, (torch.arange(9), 4, 0, 5, torch.empty(0))),
        (digests._row_digests, (torch.arange(3), [_ROWS])),
        (packing._pack_rows, ([_TABLE], [torch.arange(5)], [1], [0], poisoned(256))),
        (packing._unpack_rows, (_TABLE, torch.arange(5), torch.randn(5, 3))),
        *((quantization._quantize, (_ROWS, precision)) for precision in PRECISIONS),
        *((quantization._dequantize, (quantize(_ROWS, precision), precision, 5)) for precision in PRECISIONS),
        (
            dirty_drain._drain_dirty,
            (
                torch.tensor([0, 5, 0]),
                _WRITTEN[0],
                _PLAN.columns,
                _PLAN.numbers,
                2,
                _PLAN.descriptors,
                *_WRITTEN[1:],
            ),
        ),
    ],
)
def test_operators_are_registered_rightly(operator: Any, args: tuple[Any, ...]) -> None:
    """The operators' schemas, and what they say to a tracer, are true."""
    torch.library.opcheck(operator, args)


def test_tables_that_nobody_traces_go_past_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain call does not pay for torch's dispatch; a traced one comes to the operator, and marks the same."""

    def mark(bitmap: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
        dirty_bitmap.mark_dirty_tables(bitmap, [row_ids, row_ids], [0, 64], [50, 50])
        return bitmap + 0

    graph = make_fx(mark, tracing_mode="fake")(make_bitmap(100), torch.tensor([5]))
    assert "headrace.mark_dirty_tables" in graph.code
    assert graph(make_bitmap(100), torch.tensor([1])).tolist() == [2, 2]
    monkeypatch.delattr(dirty_bitmap, "_mark_dirty_tables")
    assert mark(make_bitmap(100), torch.tensor([1])).tolist() == [2, 2]


def test_a_compiled_cut_does_the_same() -> None:
    """Marks of features and a cut, by a plan that was made before, write the same when they are traced."""
    table = DrainTable(first_slot=0, num_rows=70, row_offset=3, seed=1, columns=(torch.randn(70, 4),))
    plan = DrainPlan([table], 2)
    features = torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([70])

    def mark_and_cut(
        bitmap: torch.Tensor, ids: torch.Tensor, cursor: torch.Tensor, out: torch.Tensor, header: torch.Tensor
    ) -> None:
        mark_dirty_features(bitmap, ids, *features)
        drain_dirty(bitmap, cursor, plan, out, header)

    results = []
    compiled = torch.compile(mark_and_cut, backend="aot_eager", fullgraph=True)
    for function in (mark_and_cut, compiled):
        written = torch.zeros(1, dtype=torch.int64), poisoned(1024), torch.zeros(plan.header_words, dtype=torch.int64)
        bitmap = make_bitmap(70)
        function(bitmap, torch.tensor([69, 0, 7]), *written)
        results.append((bitmap, *written))
    assert results[0][3].tolist()[3:] != [0, 0]
    assert all(torch.equal(plain, traced) for plain, traced in zip(*results, strict=True))
