"""The bench of row kernels: `headrace bench kernels`. Each fast way on the CPU beside plain PyTorch doing the same.

What is plain is the operation's definition, such as `table[row_ids]` and a copy; for mark and take it is `torch.unique`
over the ids of all steps, which is what one would write instead. Before anything is timed, both give the same answer.

Times are the processor's, with torch on one thread: what other programs do on the machine counts less, and a training
thread has one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer

from headrace.kernels.bitmap import make_bitmap, mark_dirty, take_dirty
from headrace.kernels.bucketize import block_bucketize, block_bucketize_reference
from headrace.kernels.cut_plan import CutPlan, CutTable
from headrace.kernels.dirty_cut import cut_dirty, cut_dirty_reference
from headrace.kernels.quantize import dequantize, quantize
from headrace.kernels.row_digests import row_digests, row_digests_reference
from headrace.kernels.row_packing import layout_of, pack_rows, pack_rows_reference, unpack_rows, unpack_rows_reference
from headrace.kernels.row_quantization import Precision, dequantize_rows_reference, quantize_rows_reference
from headrace.schemas.errors import HeadraceError
from headrace.scripts.benches.bench_kernels_gpu import GpuFigures, measure_gpu
from headrace.scripts.benches.bench_report import JsonOption, OnStage, RoundsOption, check_json, conclude, show_progress
from headrace.scripts.benches.bench_rows import zipf_ids
from headrace.scripts.one_torch_thread import one_torch_thread

__all__ = ["NUM_STAGES", "KernelsConfig", "kernels", "measure_cpu", "run"]

NUM_STAGES = 13
"""How often `on_stage` is called."""

_DIM = 128
_NUM_SHARDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelsConfig:
    """How much is measured.

    Attributes:
        num_rounds: How often each is timed, in turn; medians count.
        num_rows: Rows of the bitmap; tables have a fiftieth of them, of 128 float32.
        num_steps: Steps that are marked before they are taken.
        step_ids: Ids that a step looks up.
        seed: Of the random numbers.
    """

    num_rounds: int = 7
    num_rows: int = 10_000_000
    num_steps: int = 32
    step_ids: int = 65_536
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """One comparison: two functions that return the same tensors."""

    name: str
    fast: Callable[[], tuple[torch.Tensor, ...]]
    plain: Callable[[], tuple[torch.Tensor, ...]]


def measure_cpu(config: KernelsConfig, on_stage: OnStage) -> dict[str, Any]:
    """Return for each operation the ratio of times, plain over fast, and both times in processor milliseconds.

    Args:
        config: How much.
        on_stage: Told what comes next.
    """
    figures: dict[str, Any] = {"ratios": {}, "fast_ms": {}, "plain_ms": {}}
    with one_torch_thread():
        _compare(config, figures, on_stage)
    return figures


def _compare(config: KernelsConfig, figures: dict[str, Any], on_stage: OnStage) -> None:
    for case in _cases(config, np.random.default_rng(config.seed)):
        on_stage(case.name)
        for fast, plain in zip(case.fast(), case.plain(), strict=True):
            if not torch.equal(fast, plain):
                raise AssertionError(f"{case.name}: the fast way gives something else")
        times: dict[str, list[float]] = {"fast": [], "plain": []}
        for _ in range(config.num_rounds):
            for name, run in (("fast", case.fast), ("plain", case.plain)):
                begin = time.process_time()
                run()
                times[name].append(time.process_time() - begin)
        fast_s, plain_s = median(times["fast"]), median(times["plain"])
        figures["ratios"][case.name] = plain_s / fast_s
        figures["fast_ms"][case.name], figures["plain_ms"][case.name] = fast_s * 1e3, plain_s * 1e3


def kernels(
    *,
    json_path: JsonOption = None,
    rounds: RoundsOption = 7,
    small: Annotated[
        bool, typer.Option("--small", help="A hundredth of the rows: whether it works, not how fast.")
    ] = False,
) -> None:
    """Measure the row kernels: on the CPU beside plain PyTorch, on a GPU beside its copy bandwidths.

    Raises:
        ConfigError: A path cannot be written.
        HeadraceError: Some of a GPU's figures could not be measured; the others were printed and written.
    """
    check_json(json_path)
    config = KernelsConfig(num_rounds=rounds)
    if small:
        config = KernelsConfig(num_rounds=rounds, num_rows=100_000, num_steps=4, step_ids=1000)

    def keep(figures: dict[str, Any]) -> None:
        if json_path is not None:
            json_path.write_text(json.dumps(figures, indent=2) + "\n", "utf-8")

    with show_progress("kernels", NUM_STAGES) as on_stage:
        figures = run(config, on_stage=on_stage, keep=keep)
    conclude(figures, json_path)
    if failures := figures["gpu_failures"]:
        name, reason = next(iter(failures.items()))
        others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        raise HeadraceError(f"bench kernels: a GPU is here and {name} was not measured ({reason}){others}")


def run(
    config: KernelsConfig, *, on_stage: OnStage, keep: Callable[[dict[str, Any]], None] = lambda figures: None
) -> dict[str, Any]:
    """Return the figures of the CPU and, null where there is none, of the GPU, and why some of these are missing.

    Args:
        config: How much.
        on_stage: Told what comes next.
        keep: Called with what there is so far after each part on a GPU, of which a later one may not end.
    """
    figures = measure_cpu(config, on_stage)

    def both(gpu: GpuFigures) -> dict[str, Any]:
        return {"cpu": figures, "gpu": gpu.figures, "gpu_failures": gpu.failures}

    if not torch.cuda.is_available():
        return both(GpuFigures())
    on_stage("GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    return both(measure_gpu(device, config.num_rounds, lambda gpu: keep(both(gpu))))


def _cases(config: KernelsConfig, rng: np.random.Generator) -> Iterator[_Case]:
    for ids in ("zipf", "uniform"):
        yield _mark_and_take(config, rng, ids)
    table_rows = config.num_rows // 50
    weights = torch.from_numpy(rng.standard_normal((table_rows, _DIM), np.float32))
    state = torch.from_numpy(rng.random(table_rows, np.float32))
    row_ids = torch.from_numpy(np.sort(rng.choice(table_rows, table_rows // 4, replace=False)))
    yield _pack(weights, state, row_ids)
    values = weights[row_ids]
    yield _unpack(weights, row_ids, values)
    columns = [values, state[row_ids]]
    yield _Case(
        name="row_digests",
        fast=lambda: (row_digests(row_ids, columns),),
        plain=lambda: (row_digests_reference(row_ids, columns),),
    )
    yield from _bucketize(config, rng)
    yield _cut(weights, state, row_ids)
    precisions: tuple[Precision, ...] = ("int8", "int4")
    for precision in precisions:
        yield from _quantize(values, precision)


def _mark_and_take(config: KernelsConfig, rng: np.random.Generator, ids: str) -> _Case:
    num_ids = config.num_steps * config.step_ids
    drawn = rng.integers(0, config.num_rows, num_ids) if ids == "uniform" else zipf_ids(rng, config.num_rows, num_ids)
    steps = torch.split(torch.from_numpy(drawn), config.step_ids)
    bitmap = make_bitmap(config.num_rows)

    def mark_and_take() -> tuple[torch.Tensor, ...]:
        for step in steps:
            mark_dirty(bitmap, step)
        return take_dirty(bitmap)[:1]

    return _Case(name=f"mark_take_vs_unique_{ids}", fast=mark_and_take, plain=lambda: (torch.unique(torch.cat(steps)),))


def _pack(weights: torch.Tensor, state: torch.Tensor, row_ids: torch.Tensor) -> _Case:
    _, size_bytes = layout_of([weights], [row_ids.numel()], [[state]])
    buffers = torch.zeros(size_bytes, dtype=torch.uint8), torch.zeros(size_bytes, dtype=torch.uint8)

    def fast() -> tuple[torch.Tensor, ...]:
        pack_rows([weights], [row_ids], [[state]], buffers[0])
        return buffers[:1]

    def plain() -> tuple[torch.Tensor, ...]:
        pack_rows_reference([weights], [row_ids], [[state]], buffers[1])
        return buffers[1:]

    return _Case(name="pack_rows", fast=fast, plain=plain)


def _unpack(weights: torch.Tensor, row_ids: torch.Tensor, values: torch.Tensor) -> _Case:
    tables = weights.clone(), weights.clone()

    def fast() -> tuple[torch.Tensor, ...]:
        unpack_rows(tables[0], row_ids, values)
        return tables[:1]

    def plain() -> tuple[torch.Tensor, ...]:
        unpack_rows_reference(tables[1], row_ids, values)
        return tables[1:]

    return _Case(name="unpack_rows", fast=fast, plain=plain)


def _bucketize(config: KernelsConfig, rng: np.random.Generator) -> Iterator[_Case]:
    ids = torch.from_numpy(rng.integers(0, config.num_rows, config.num_rows // 10))
    weights = torch.from_numpy(rng.random(ids.numel()))
    block_rows = -(-config.num_rows // _NUM_SHARDS)
    for name, its_block_rows in (("hash", None), ("block", block_rows)):

        def fast(block_rows: int | None = its_block_rows) -> tuple[torch.Tensor, ...]:
            done = block_bucketize(ids, _NUM_SHARDS, block_rows=block_rows, seed=1, weights=weights)
            return tuple(column for column in done if column is not None)

        def plain(block_rows: int | None = its_block_rows) -> tuple[torch.Tensor, ...]:
            done = block_bucketize_reference(ids, _NUM_SHARDS, block_rows=block_rows, seed=1, weights=weights)
            return tuple(column for column in done if column is not None)

        yield _Case(name=f"bucketize_by_{name}", fast=fast, plain=plain)


def _cut(weights: torch.Tensor, state: torch.Tensor, row_ids: torch.Tensor) -> _Case:
    table = CutTable(
        first_slot=0, num_rows=weights.shape[0], row_offset=0, seed=1, columns=(weights, state.unsqueeze(1))
    )
    plan = CutPlan([table], _NUM_SHARDS)
    dirty = make_bitmap(table.num_rows)
    mark_dirty(dirty, row_ids)
    size_bytes = max(plan.min_out_bytes, table.packed_bytes(row_ids.numel()))

    def written() -> tuple[torch.Tensor, ...]:
        out = torch.zeros(size_bytes, dtype=torch.uint8)
        return dirty.clone(), torch.zeros(1, dtype=torch.int64), out, torch.zeros(plan.header_words, dtype=torch.int64)

    kept = written(), written()

    def fast() -> tuple[torch.Tensor, ...]:
        bitmap, cursor, out, header = kept[0]
        bitmap.copy_(dirty)
        cut_dirty(bitmap, cursor, plan, out, header)
        return kept[0]

    def plain() -> tuple[torch.Tensor, ...]:
        bitmap, cursor, out, header = kept[1]
        bitmap.copy_(dirty)
        cut_dirty_reference(bitmap, cursor, plan.tables, _NUM_SHARDS, out, header)
        return kept[1]

    return _Case(name="cut_dirty", fast=fast, plain=plain)


def _quantize(values: torch.Tensor, precision: Precision) -> Iterator[_Case]:
    packed = quantize(values, precision)
    yield _Case(
        name=f"quantize_{precision}",
        fast=lambda: (quantize(values, precision),),
        plain=lambda: (quantize_rows_reference(values, precision),),
    )
    yield _Case(
        name=f"dequantize_{precision}",
        fast=lambda: (dequantize(packed, precision, _DIM),),
        plain=lambda: (dequantize_rows_reference(packed, precision, _DIM),),
    )
