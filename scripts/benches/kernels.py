"""`headrace bench kernels`: the row kernels. On the CPU, each fast way next to plain PyTorch doing the same.

Plain is the definition of the operation, such as `table[row_ids]` and a copy; for mark and take it is `torch.unique` of
the ids of all steps, which one would write instead. Both must give the same result before they are timed. Times are
processor time with torch on one thread, as a training thread has it: other programs on the machine count less.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from headrace.schemas.errors import HeadraceError
from headrace.scripts.benches.harness import (
    JsonOption,
    OnStage,
    RoundsOption,
    check_json,
    conclude,
    one_torch_thread,
    show_progress,
    write_json,
)
from headrace.scripts.benches.kernels_gpu import GpuFigures, measure_gpu
from headrace.scripts.benches.workload import draw_ids

__all__ = ["KernelsConfig", "Part", "kernels", "measure", "measure_cpu"]


class Part(StrEnum):
    """A part of `headrace bench kernels`: operations on the CPU, kernels on a GPU, and training steps there."""

    CPU = "cpu"
    KERNELS = "kernels"
    STEP = "step"


_DIM, _NUM_SHARDS = 128, 8

_Run = Callable[[], Any]  # returns a tensor, or a tuple of tensors or None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """How much `headrace bench kernels` measures."""

    num_rounds: int = 7
    num_rows: int = 10_000_000  # of the bitmap; tables have a fiftieth, of 128 float32
    num_steps: int = 32  # marked before they are taken
    step_ids: int = 65_536  # ids that a step looks up
    seed: int = 0
    parts: tuple[Part, ...] = tuple(Part)


def kernels(
    *,
    json_path: JsonOption = None,
    rounds: RoundsOption = 7,
    small: Annotated[
        bool, typer.Option("--small", help="A hundredth of the rows: shows whether it works, not how fast.")
    ] = False,
    part: Annotated[
        list[Part] | None,
        typer.Option(help="Measure only this part; may be given twice. `kernels` and `step` are a GPU's."),
    ] = None,
) -> None:
    """Measure the row kernels: on the CPU next to plain PyTorch, on a GPU next to its copy bandwidths.

    Raises:
        ConfigError: A path cannot be written.
        HeadraceError: Some of a GPU's figures could not be measured; the others were printed and written.
    """
    check_json(json_path)
    config = KernelsConfig(num_rounds=rounds, parts=tuple(part or Part))
    if small:
        config = dataclasses.replace(config, num_rows=100_000, num_steps=4, step_ids=1000)

    def keep(figures: dict[str, Any]) -> None:
        if json_path is not None:
            write_json(figures, json_path)

    with show_progress("kernels") as on_stage:
        figures = measure(config, on_stage, keep)
    conclude(figures, json_path)
    if failures := figures["gpu_failures"]:
        name, reason = next(iter(failures.items()))
        others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise HeadraceError(f"bench kernels: a GPU is here and {name} was not measured ({reason}){others}")


def measure(
    config: KernelsConfig, on_stage: OnStage, keep: Callable[[dict[str, Any]], None] = lambda figures: None
) -> dict[str, Any]:
    """Return the figures of the CPU, those of the GPU (null without one), and why some of these are missing.

    `keep` gets the figures so far after each part on a GPU, because a later part may never end.
    """
    cpu = measure_cpu(config, on_stage) if Part.CPU in config.parts else {}

    def both(gpu: GpuFigures) -> dict[str, Any]:
        return {
            "rounds": config.num_rounds,
            "cpu": cpu,
            "gpu": gpu.figures,
            "gpu_failures": gpu.failures,
            "gpu_absent": gpu.absent,
        }

    if not torch.cuda.is_available():
        return both(GpuFigures())
    on_stage("GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    return both(measure_gpu(device, config.num_rounds, lambda gpu: keep(both(gpu)), parts=config.parts))


def measure_cpu(config: KernelsConfig, on_stage: OnStage) -> dict[str, Any]:
    """Return for each operation the ratio of times, plain over fast, and both times in processor milliseconds."""
    figures: dict[str, Any] = {"ratios": {}, "fast_ms": {}, "plain_ms": {}}
    with one_torch_thread():
        for name, fast, plain in _cases(config, np.random.default_rng(config.seed)):
            on_stage(name)
            for ours, theirs in zip(_tensors(fast()), _tensors(plain()), strict=True):
                if not torch.equal(ours, theirs):
                    raise AssertionError(f"{name}: the fast way gives another result")
            times_s: tuple[list[float], list[float]] = ([], [])
            for _ in range(config.num_rounds):
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


def _cases(config: KernelsConfig, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield name, fast and plain way of each comparison."""
    for ids in ("zipf", "uniform"):
        drawn = draw_ids(rng, ids, config.num_rows, config.num_steps * config.step_ids)
        steps = torch.split(torch.from_numpy(drawn), config.step_ids)
        mark_and_take = partial(_mark_and_take, make_bitmap(config.num_rows), steps)
        yield f"mark_take_vs_unique_{ids}", mark_and_take, partial(_unique, steps)
    table_rows = config.num_rows // 50
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
    routed = torch.from_numpy(rng.integers(0, config.num_rows, config.num_rows // 10))
    wide = torch.from_numpy(rng.random(routed.numel()))
    for name, block_rows in (("hash", None), ("block", -(-config.num_rows // _NUM_SHARDS))):
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

    return (
        make_way(lambda bitmap, cursor, out, header: drain_dirty(bitmap, cursor, plan, out, header)),
        make_way(
            lambda bitmap, cursor, out, header: drain_dirty_reference(
                bitmap, cursor, plan.tables, _NUM_SHARDS, out, header
            )
        ),
    )
