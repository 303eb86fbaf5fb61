"""The GPU's part of `headrace bench kernels`: how near each kernel comes to what its memory can do.

A share is the time that the fewest bytes would take at the bandwidth of a plain copy, over the time of the kernel. Each
input is read once and each output written once. The bandwidths are measured in the same run, and so are peers: torch's
operations, and FBGEMM's where it is installed for CUDA. `gpu_step.py` measures what streaming costs a training step.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from headrace.kernels.bucketize import block_bucketize
from headrace.kernels.digests import row_digests
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty, mark_dirty_features, take_dirty
from headrace.kernels.dirty_drain import DrainPlan, DrainTable, drain_dirty
from headrace.kernels.packing import layout_of, pack_rows, unpack_rows
from headrace.kernels.quantization import dequantize, quantize
from headrace.kernels.runtime.cuda_module import FAMILIES
from headrace.kernels.runtime.dispatch import gpu_module
from headrace.scripts.benches.gpu_step import (
    FUSED_FIGURES,
    PROFILE_FIGURES,
    STEP_FIGURES,
    measure_fused_step,
    measure_step,
    profile_step,
)

__all__ = ["GPU_FIGURES", "GpuFigures", "measure_gpu"]

# A bitmap of twice the L2 cache of an H200, whose time is that of many launches.
_NUM_ROWS, _NUM_MARKED = 1_000_000_000, 10_000_000
_FLUSHED_BYTES = 2**28
_TABLE_ROWS, _DIM, _NUM_IDS = 4_000_000, 128, 1_000_000
_NUM_TABLES, _NUM_SHARDS, _NUM_PARTITIONS = 64, 8, 1024
# Rows of 8 bytes: with fewer of them launches would be timed, not memory.
_NUM_BUCKETIZED = 16_000_000
_COPY_BYTES, _D2H_BYTES = 2**31, 2**28
_WARM_UPS = 3
_WAIT_CYCLES = 2_000_000
_ROW_BYTES = 4 * _DIM

_SECTOR_ROWS = 8 * 32  # of a bitmap: a GPU's memory is read and written in sectors of 32 bytes
_MAX_STEP_ROUNDS = 5  # in each the server writes rows to disk

GPU_FIGURES: Final = (
    "device",
    "device_copy_bytes_per_s",
    "pinned_d2h_bytes_per_s",
    "mark_dirty_ids_per_s",
    "mark_dirty_share",
    "take_dirty_share",
    "pack_rows_share",
    "pack_vs_index_select",
    "pack_vs_masked_index_select",
    "unpack_rows_share",
    "row_digests_share",
    "bucketize_share",
    "quantize_int8_share",
    "dequantize_int8_share",
    "pack_and_d2h_share_of_d2h",
    "pack_to_pinned_share_of_d2h",
    "cut_dirty_share",
    "mark_and_cut_share",
    "cut_vs_unique",
    "cut_first_vs_moved",
    *STEP_FIGURES,
    *FUSED_FIGURES,
    *PROFILE_FIGURES,
)
"""What `measure_gpu` measures; all null without a GPU."""


class _PeerAbsentError(Exception):
    pass


@dataclass(kw_only=True, slots=True)
class GpuFigures:
    """The figures of `GPU_FIGURES`, None if not measured, and the reason for each whose part failed.

    `absent` has the reason for each that compares with a peer which is not installed.
    """

    figures: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(GPU_FIGURES))
    failures: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], run: Callable[[], tuple[float, ...]]) -> None:
        """Measure one part; keep its figures, or why there are none."""
        try:
            measured = run()
        except _PeerAbsentError as exc:
            self.absent.update(dict.fromkeys(names, str(exc)))
        except Exception as exc:
            traceback.print_exc()
            self.failures.update(dict.fromkeys(names, f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"))
        else:
            self.figures.update(zip(names, measured, strict=True))


def measure_gpu(
    device: torch.device,
    num_rounds: int,
    keep: Callable[[GpuFigures], None] = lambda measured: None,
    *,
    parts: Sequence[str] = ("kernels", "step"),
) -> GpuFigures:
    """Measure part by part; a part that fails costs only its own figures, and its traceback goes to standard error.

    The device needs some 20 GB free. `keep` is called with the figures so far after each part: a later one may never
    end. `parts` may leave out the kernels or the training steps, whose figures then stay None.
    """
    measured = GpuFigures()
    measured.figures["device"] = torch.cuda.get_device_name(device)
    if "kernels" in parts:
        _measure_kernels(device, num_rounds, keep, measured)
    if "step" in parts:
        torch.cuda.empty_cache()
        measured.add(STEP_FIGURES, lambda: measure_step(device, min(num_rounds, _MAX_STEP_ROUNDS)))
        keep(measured)
        torch.cuda.empty_cache()
        measured.add(FUSED_FIGURES, lambda: _fused_step(device, min(num_rounds, _MAX_STEP_ROUNDS)))
        keep(measured)
        torch.cuda.empty_cache()
        measured.add(PROFILE_FIGURES, lambda: profile_step(device))
    return measured


def _measure_kernels(
    device: torch.device, num_rounds: int, keep: Callable[[GpuFigures], None], measured: GpuFigures
) -> None:
    generator = torch.Generator(device).manual_seed(0)
    floors = "device_copy_bytes_per_s", "pinned_d2h_bytes_per_s"
    measured.add(floors, lambda: _floors(device, generator, num_rounds))
    keep(measured)
    if measured.failures:
        return
    copy_rate, d2h_rate = (measured.figures[name] for name in floors)
    for names, run in _parts(device, generator, copy_rate, d2h_rate, num_rounds):
        measured.add(names, functools.partial(_with_kernels, device, run))
        keep(measured)


def _fused_step(device: torch.device, num_rounds: int) -> tuple[float, ...]:
    try:
        importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    except (ImportError, OSError) as exc:
        raise _PeerAbsentError(f"fbgemm_gpu is not installed: {str(exc).partition(chr(10))[0]}") from exc
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::bounds_check_indices", "CUDA"):
        raise _PeerAbsentError("this fbgemm_gpu is a build for the CPU")
    return measure_fused_step(device, num_rounds)


def _with_kernels(device: torch.device, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """Measure a part, unless torch's own operations would take the place of kernels that cannot be compiled."""
    for family in FAMILIES:
        gpu_module(family, device)
    return run()


def _parts(
    device: torch.device, generator: torch.Generator, copy_rate: float, d2h_rate: float, num_rounds: int
) -> list[tuple[tuple[str, ...], Callable[[], tuple[float, ...]]]]:
    """Return (names of figures, function that measures them) of each part."""
    rows_bytes = _NUM_IDS * _ROW_BYTES

    # Made by the first part that needs it, so that a failure is that part's.
    @functools.cache
    def rows() -> _Rows:
        return _Rows(device, generator)

    def share(num_bytes: int, run: Callable[[], object]) -> tuple[float]:
        return (num_bytes / copy_rate / _seconds(run, num_rounds),)

    def share_of_rows(num_bytes: int, run: Callable[[_Rows], object]) -> tuple[float]:
        return share(num_bytes, functools.partial(run, rows()))

    def pack_to_host() -> tuple[float, ...]:
        of = rows()
        host = torch.empty(of.out.numel(), dtype=torch.uint8, pin_memory=True)

        def pack_and_copy() -> None:
            of.pack(of.out)
            host.copy_(of.out, non_blocking=True)

        floor_s = of.out.numel() / d2h_rate
        return floor_s / _seconds(pack_and_copy, num_rounds), floor_s / _seconds(lambda: of.pack(host), num_rounds)

    def bucketize() -> tuple[float, ...]:
        ids = torch.randint(0, _NUM_ROWS, (_NUM_BUCKETIZED,), device=device, generator=generator)
        wide = torch.rand(_NUM_BUCKETIZED, dtype=torch.float64, device=device, generator=generator)
        # Ids and weights in; ids, positions and weights out.
        return share(40 * _NUM_BUCKETIZED, lambda: block_bucketize(ids, _NUM_SHARDS, weights=wide))

    def codes() -> tuple[float, ...]:
        values = rows().values
        packed = quantize(values, "int8")
        num_bytes = rows_bytes + packed.numel()
        shares = share(num_bytes, lambda: quantize(values, "int8"))
        return shares + share(num_bytes, lambda: dequantize(packed, "int8", _DIM))

    def unpack(of: _Rows) -> None:
        unpack_rows(of.weights, of.row_ids, of.values)

    def digest(of: _Rows) -> None:
        row_digests(of.row_ids, [of.values])

    def pack_vs_index_select() -> tuple[float]:
        of = rows()
        values = torch.empty_like(of.values)
        theirs_s = _seconds(lambda: torch.index_select(of.weights, 0, of.row_ids, out=values), num_rounds)
        return (theirs_s / _seconds(lambda: of.pack(of.out), num_rounds),)

    def pack_vs_masked_index_select() -> tuple[float]:
        of = rows()
        select, values = _masked_index_select(), torch.zeros_like(of.values)
        count = torch.tensor([of.row_ids.numel()], dtype=torch.int32, device=device)

        def run() -> None:
            select(values, of.row_ids, of.weights, count)

        run()
        assert torch.equal(values, of.values), "masked_index_select gives other rows"
        return (_seconds(run, num_rounds) / _seconds(lambda: of.pack(of.out), num_rounds),)

    bitmap = "mark_dirty_ids_per_s", "mark_dirty_share", "take_dirty_share"
    drain = "cut_dirty_share", "mark_and_cut_share", "cut_vs_unique", "cut_first_vs_moved"
    return [
        (bitmap, lambda: _bitmap_figures(device, generator, copy_rate, num_rounds)),
        (("pack_rows_share",), lambda: share_of_rows(2 * rows_bytes + 16 * _NUM_IDS, lambda of: of.pack(of.out))),
        (("pack_vs_index_select",), pack_vs_index_select),
        (("pack_vs_masked_index_select",), pack_vs_masked_index_select),
        (("unpack_rows_share",), lambda: share_of_rows(2 * rows_bytes + 8 * _NUM_IDS, unpack)),
        (("row_digests_share",), lambda: share_of_rows(rows_bytes + 16 * _NUM_IDS, digest)),
        (("bucketize_share",), bucketize),
        (("quantize_int8_share", "dequantize_int8_share"), codes),
        (("pack_and_d2h_share_of_d2h", "pack_to_pinned_share_of_d2h"), pack_to_host),
        (drain, lambda: _drain_figures(rows().weights, generator, copy_rate, num_rounds)),
    ]


def _masked_index_select() -> Callable[..., Any]:
    """Return FBGEMM's operator."""
    try:
        importlib.import_module("fbgemm_gpu")
        operator: Callable[..., Any] = torch.ops.fbgemm.masked_index_select
    except (ImportError, OSError, AttributeError) as exc:
        raise _PeerAbsentError(
            f"this fbgemm_gpu, if any, has no such operator: {str(exc).partition(chr(10))[0]}"
        ) from exc
    return operator


class _Rows:
    """A table, some of its rows, and a buffer for them."""

    def __init__(self, device: torch.device, generator: torch.Generator) -> None:
        self.weights = torch.randn(_TABLE_ROWS, _DIM, device=device, generator=generator)
        self.row_ids = torch.randperm(_TABLE_ROWS, device=device, generator=generator)[:_NUM_IDS]
        self.values = self.weights[self.row_ids]
        _, size_bytes = layout_of([self.weights], [_NUM_IDS], [[]])
        self.out = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def pack(self, out: torch.Tensor) -> None:
        pack_rows([self.weights], [self.row_ids], [[]], out)


def _floors(device: torch.device, generator: torch.Generator, num_rounds: int) -> tuple[float, float]:
    """Return bytes a second (of a copy on the device, read and written ones; of a copy to pinned memory)."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_(generator=generator)
    target = torch.empty_like(source)
    pinned = torch.empty(_D2H_BYTES, dtype=torch.uint8, pin_memory=True)
    copy_s = _seconds(lambda: target.copy_(source), num_rounds)
    d2h_s = _seconds(lambda: pinned.copy_(source[:_D2H_BYTES], non_blocking=True), num_rounds)
    return 2 * _COPY_BYTES / copy_s, _D2H_BYTES / d2h_s


def _bitmap_figures(
    device: torch.device, generator: torch.Generator, copy_rate: float, num_rounds: int
) -> tuple[float, float, float]:
    """Return (ids marked a second, share of marking, share of take)."""
    ids = torch.randint(0, _NUM_ROWS, (_NUM_MARKED,), device=device, generator=generator)
    bitmap, others = make_bitmap(_NUM_ROWS, device), make_bitmap(8 * _FLUSHED_BYTES, device)
    mark_dirty(bitmap, ids)
    full, num_dirty = bitmap.clone(), int(take_dirty(bitmap, _NUM_MARKED)[1])

    def fill(content: torch.Tensor) -> None:
        bitmap.copy_(content)
        # Only reads: they evict the bitmap from the cache and leave nothing to be written back.
        others.sum()

    empty = torch.zeros_like(bitmap)
    mark_s = _seconds(lambda: mark_dirty(bitmap, ids), num_rounds, before=lambda: fill(empty))
    take_s = _seconds(lambda: take_dirty(bitmap, _NUM_MARKED), num_rounds, before=lambda: fill(full))
    # Each id is read, and each sector of the bitmap that has a marked row is read and written.
    num_sectors = torch.unique(ids // _SECTOR_ROWS).numel()
    mark_bytes, take_bytes = 8 * _NUM_MARKED + 2 * 32 * num_sectors, 2 * bitmap.numel() * 8 + 8 * num_dirty
    return _NUM_MARKED / mark_s, mark_bytes / copy_rate / mark_s, take_bytes / copy_rate / take_s


def _drain_figures(
    weights: torch.Tensor, generator: torch.Generator, copy_rate: float, num_rounds: int
) -> tuple[float, ...]:
    """Return (share of a drain, and of marks and a drain; the speed of both over `torch.unique` and `index_select`).

    Last comes the time of a drain by the first partition map over that by a map whose partitions have moved.
    """
    device, rows, num_ids = weights.device, weights.shape[0] // _NUM_TABLES, _NUM_IDS // _NUM_TABLES
    of_tables = torch.split(weights, rows)[:_NUM_TABLES]
    slots = -(-rows // 64) * 64
    tables = [
        DrainTable(first_slot=number * slots, num_rows=rows, row_offset=0, seed=number, columns=(columns,))
        for number, columns in enumerate(of_tables)
    ]
    plan = DrainPlan(tables, _NUM_SHARDS)
    moved_plan = DrainPlan(tables, _NUM_SHARDS, np.random.default_rng(0).integers(0, _NUM_SHARDS, _NUM_PARTITIONS))
    ids = torch.randint(0, rows, (_NUM_TABLES, num_ids), device=device, generator=generator)
    numbers = torch.arange(_NUM_TABLES, device=device)
    features = torch.arange(_NUM_TABLES + 1, device=device) * num_ids, numbers * slots, torch.full_like(numbers, rows)
    bitmap, cursor = make_bitmap(plan.end_slot, device), torch.zeros(1, dtype=torch.int64, device=device)
    out_bytes = sum(table.packed_bytes(num_ids) for table in plan.tables) + plan.min_out_bytes
    out = torch.empty(out_bytes, dtype=torch.uint8, device=device)
    header = torch.empty(plan.header_words, dtype=torch.int64, device=device)

    def mark() -> None:
        mark_dirty_features(bitmap, ids.view(-1), *features)

    def drain(by: DrainPlan = plan) -> None:
        drain_dirty(bitmap, cursor, by, out, header)

    def mark_and_drain() -> None:
        mark()
        drain()

    def unique_and_select() -> None:
        for table, table_ids in zip(of_tables, ids, strict=True):
            table.index_select(0, torch.unique(table_ids))

    drain_s = _seconds(drain, num_rounds, before=mark)
    # The bitmap and the rows, with their ids, read and written.
    num_bytes = 2 * bitmap.numel() * 8 + 2 * int(header[0])
    both_s = _seconds(mark_and_drain, num_rounds)
    return (
        num_bytes / copy_rate / drain_s,
        (num_bytes + 8 * ids.numel()) / copy_rate / both_s,
        _seconds(unique_and_select, num_rounds) / both_s,
        drain_s / _seconds(functools.partial(drain, moved_plan), num_rounds, before=mark),
    )


def _seconds(run: Callable[[], object], num_rounds: int, *, before: Callable[[], object] = lambda: None) -> float:
    """Return the median time on the device; `before` does not count."""
    times: list[float] = []
    for number in range(_WARM_UPS + num_rounds):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        # The device waits until all is queued; otherwise the host's time would be measured.
        torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= _WARM_UPS:
            times.append(begin.elapsed_time(end) / 1e3)
    return median(times)
