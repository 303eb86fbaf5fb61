"""The operations in a compiled function: traced whole, without a break, to the same results."""

from __future__ import annotations

import torch
from kernel_inputs import poisoned

from headrace.kernels.bucketize import block_bucketize
from headrace.kernels.digests import row_digests
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty, mark_dirty_features, take_dirty
from headrace.kernels.dirty_drain import DrainPlan, DrainTable, drain_dirty
from headrace.kernels.packing import pack_rows, unpack_rows
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
