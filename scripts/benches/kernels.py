"""`headrace bench kernels`: the row kernels. On the CPU, each fast way next to plain PyTorch doing the same.

Plain is the definition of the operation, such as `table[row_ids]` and a copy; for mark and take it is `torch.unique` of
the ids of all steps, which one would write instead. Both must give the same result before they are timed. Times are
processor time with torch on one thread, as a training thread has it: other programs on the machine count less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from headrace.kernels.bucketize import block_bucketize, block_bucketize_reference
from headrace.kernels.digests import row_digests, row_digests_reference
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty, take_dirty
from headrace.kernels.dirty_drain import DrainPlan, DrainTable, drain_dirty, drain_dirty_reference
from headrace.kernels.packing import layout_of, pack_rows, pack_rows_reference, unpack_rows, unpack_rows_reference
from headrace.kernels.precisions import Precision
from headrace.kernels.quantization import (
    dequantize,
    dequantize_rows_reference,
    quantize,
    quantize_rows_reference,
)
from headrace.scripts.benches.harness import OnStage, RoundsOption, bench_command, one_torch_thread
from headrace.scripts.benches.kernels_gpu import GpuFigures, measure_gpu
from headrace.scripts.benches.workload import draw_ids

__all__ = ["Part", "kernels", "measure", "measure_cpu"]


class Part(StrEnum):
    """A part of `headrace bench kernels`: operations on the CPU, kernels on a GPU, and training steps there."""

    CPU = "cpu"
    KERNELS = "kernels"
    STEP = "step"


_DIM, _NUM_SHARDS = 128, 8

_Run = Callable[[], Any]  # returns a tensor, or a tuple of tensors or None


def measure(
    on_stage: OnStage,
    *,
    num_rounds: RoundsOption = 7,
    part: Annotated[
        list[Part] | None,
        typer.Option(help="Measure only this part; may be given twice. `kernels` and `step` are a GPU's."),
    ] = None,
    num_rows: int = 10_000_000,
    num_steps: int = 32,
    step_ids: int = 65_536,
) -> dict[str, Any]:
    """Measure the row kernels: on the CPU next to plain PyTorch, on a GPU next to its copy bandwidths.

    On the CPU, a bitmap of `num_rows` and tables with a fiftieth, of 128 float32; `num_steps` of `step_ids` ids are
    marked before they are taken. Without a GPU its figures are null. The exit code is 1 if there is one and a figure
    could not be measured.
    """
    parts = part or list(Part)
    cpu, gpu = dict[str, Any](), GpuFigures()
    if Part.CPU in parts:
        cpu = measure_cpu(on_stage, num_rounds, _cases(np.random.default_rng(0), num_rows, num_steps, step_ids))
    if torch.cuda.is_available():
        on_stage("GPU")
        gpu = measure_gpu(torch.device("cuda", torch.cuda.current_device()), num_rounds, parts)
    of_gpu = {"gpu": gpu.figures, "gpu_failures": gpu.failures, "gpu_absent": gpu.absent}
    return {"num_gpu_failures": len(gpu.failures), "cpu": cpu, **of_gpu}


kernels = bench_command("kernels", measure)


def measure_cpu(on_stage: OnStage, num_rounds: int, cases: Iterator[tuple[Any, ...]]) -> dict[str, Any]:
    """Return for each operation the ratio of times, plain over fast, and both times in processor milliseconds."""
    figures: dict[str, Any] = {"ratios": {}, "fast_ms": {}, "plain_ms": {}}
    with one_torch_thread():
        for name, fast, plain in cases:
            on_stage(name)
            for ours, theirs in zip(_tensors(fast()), _tensors(plain()), strict=True):
                if not torch.equal(ours, theirs):
                    raise AssertionError(f"{name}: the fast way gives another result")
            times_s: tuple[list[float], list[float]] = ([], [])
            for _ in range(num_rounds):
                for times, run in zip(times_s, (fast, plain), strict=True):
                    begin_s = time.process_time()
                    run()
                    times.append(time.process_time() - begin_s)
            fast_s, plain_s = map(median, times_s)
            figures["ratios"][name] = plain_s / fast_s
            figures["fast_ms"][name], figures["plain_ms"][name] = fast_s * 1e3, plain_s * 1e3
    return figures


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else [column for column in result if column is not None]


def _cases(rng: np.random.Generator, num_rows: int, num_steps: int, step_ids: int) -> Iterator[tuple[Any, ...]]:
    """Yield name, fast and plain way of each comparison."""
    for ids in ("zipf", "uniform"):
        drawn = draw_ids(rng, ids, num_rows, num_steps * step_ids)
        steps = torch.split(torch.from_numpy(drawn), step_ids)
        mark_and_take = partial(_mark_and_take, make_bitmap(num_rows), steps)
        yield f"mark_take_vs_unique_{ids}", mark_and_take, partial(_unique, steps)
    table_rows = num_rows // 50
    weights = torch.from_numpy(rng.standard_normal((table_rows, _DIM), np.float32))
    state = torch.from_numpy(rng.random(table_rows, np.float32))
    row_ids = torch.from_numpy(np.sort(rng.choice(table_rows, table_rows // 4, replace=False)))

    def pack(kernel: Callable[..., Any], out: torch.Tensor) -> torch.Tensor:
        kernel([weights], [row_ids], [[state]], out)
        return out

    _, size_bytes = layout_of([weights], [row_ids.numel()], [[state]])
    buffers = torch.zeros(2, size_bytes, dtype=torch.uint8)
    yield "pack_rows", partial(pack, pack_rows, buffers[0]), partial(pack, pack_rows_reference, buffers[1])
    values = weights[row_ids]

    def unpack(kernel: Callable[..., Any], table: torch.Tensor) -> torch.Tensor:
        kernel(table, row_ids, values)
        return table

    tables = weights.clone(), weights.clone()
    yield "unpack_rows", partial(unpack, unpack_rows, tables[0]), partial(unpack, unpack_rows_reference, tables[1])
    columns = [values, state[row_ids]]
    yield "row_digests", lambda: row_digests(row_ids, columns), lambda: row_digests_reference(row_ids, columns)
    routed = torch.from_numpy(rng.integers(0, num_rows, num_rows // 10))
    wide = torch.from_numpy(rng.random(routed.numel()))
    for name, block_rows in (("hash", None), ("block", -(-num_rows // _NUM_SHARDS))):
        ways: Iterator[Any] = (
            partial(bucketize, routed, _NUM_SHARDS, block_rows=block_rows, seed=1, weights=wide)
            for bucketize in (block_bucketize, block_bucketize_reference)
        )
        yield f"bucketize_by_{name}", *ways
    yield "cut_dirty", *_drain_ways(weights, state, row_ids)
    precisions: tuple[Precision, ...] = ("int8", "int4")
    for precision in precisions:
        packed = quantize(values, precision)
        yield f"quantize_{precision}", *(partial(way, values, precision) for way in (quantize, quantize_rows_reference))
        ways = (partial(way, packed, precision, _DIM) for way in (dequantize, dequantize_rows_reference))
        yield f"dequantize_{precision}", *ways


def _mark_and_take(bitmap: torch.Tensor, steps: tuple[torch.Tensor, ...]) -> torch.Tensor:
    for step in steps:
        mark_dirty(bitmap, step)
    return take_dirty(bitmap)[0]


def _unique(steps: tuple[torch.Tensor, ...]) -> torch.Tensor:
    unique: torch.Tensor = torch.unique(torch.cat(steps))
    return unique


def _drain_ways(weights: torch.Tensor, state: torch.Tensor, row_ids: torch.Tensor) -> tuple[_Run, _Run]:
    table = DrainTable(
        first_slot=0, num_rows=weights.shape[0], row_offset=0, seed=1, columns=(weights, state.unsqueeze(1))
    )
    plan = DrainPlan([table], _NUM_SHARDS)
    dirty = make_bitmap(table.num_rows)
    mark_dirty(dirty, row_ids)
    size_bytes = max(plan.min_out_bytes, table.packed_bytes(row_ids.numel()))

    def make_way(drain: Callable[..., Any]) -> _Run:
        bitmap, cursor = dirty.clone(), torch.zeros(1, dtype=torch.int64)
        out, header = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(plan.header_words, dtype=torch.int64)

        def run() -> tuple[torch.Tensor, ...]:
            bitmap.copy_(dirty)
            drain(bitmap, cursor, out, header)
            return bitmap, cursor, out, header

        return run

    def drain_plainly(bitmap: torch.Tensor, cursor: torch.Tensor, *outs: torch.Tensor) -> None:
        drain_dirty_reference(bitmap, cursor, plan.tables, _NUM_SHARDS, *outs)

    return make_way(lambda bitmap, cursor, *outs: drain_dirty(bitmap, cursor, plan, *outs)), make_way(drain_plainly)
