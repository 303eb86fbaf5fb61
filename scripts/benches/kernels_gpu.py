"""The GPU's part of `headrace bench kernels`: how near each kernel comes to what its memory can do.

A share is the time that the fewest bytes would take at the bandwidth of a plain copy, over the time of the kernel. Each
input is read once and each output written once. The bandwidths are measured in the same run, and so are torch's
operations. `gpu_step.py` measures what streaming costs a training step.
"""

from __future__ import annotations

import functools
import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import torch

from headrace.kernels.digests import row_digests
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty_features
from headrace.kernels.dirty_drain import DrainPlan, DrainTable, drain_dirty
from headrace.kernels.packing import layout_of, pack_rows, unpack_rows
from headrace.kernels.quantization import dequantize, quantize
from headrace.kernels.runtime.cuda_module import FAMILIES
from headrace.kernels.runtime.dispatch import gpu_module
from headrace.scripts.benches.gpu_step import FUSED_FIGURES, STEP_FIGURES, measure_fused_step, measure_step
from headrace.scripts.benches.harness import say

__all__ = ["GPU_FIGURES", "GpuFigures", "measure_gpu"]

_TABLE_ROWS, _DIM, _NUM_IDS = 4_000_000, 128, 1_000_000
_NUM_TABLES, _NUM_SHARDS = 64, 8
_COPY_BYTES, _D2H_BYTES = 2**31, 2**28
_WARM_UPS = 3
_WAIT_CYCLES = 2_000_000
_ROW_BYTES = 4 * _DIM
_MAX_STEP_ROUNDS = 5  # in each the server writes rows to disk
_FLOORS = "device_copy_bytes_per_s", "pinned_d2h_bytes_per_s"

GPU_FIGURES: Final = (
    "device",
    "device_copy_bytes_per_s",
    "pinned_d2h_bytes_per_s",
    "pack_rows_share",
    "unpack_rows_share",
    "row_digests_share",
    "quantize_int8_share",
    "dequantize_int8_share",
    "pack_to_pinned_share_of_d2h",
    "cut_dirty_share",
    "mark_and_cut_share",
    "cut_vs_unique",
    *STEP_FIGURES,
    *FUSED_FIGURES,
)
"""What `measure_gpu` measures; all null without a GPU."""


class _PeerAbsentError(Exception):
    pass


@dataclass(kw_only=True, slots=True)
class GpuFigures:
    """The figures of `GPU_FIGURES`, None if not measured, and why: a part failed, or what it needs is absent."""

    figures: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(GPU_FIGURES))
    failures: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], run: Callable[[], tuple[float, ...]]) -> None:
        """Measure one part; keep its figures, or why there are none. Say them at once: a later part may never end."""
        try:
            measured = run()
        except _PeerAbsentError as exc:
            self.absent.update(dict.fromkeys(names, str(exc)))
        except Exception as exc:
            traceback.print_exc()
            self.failures.update(dict.fromkeys(names, f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"))
        else:
            self.figures.update(zip(names, measured, strict=True))
            say(*(f"{name}: {value:g}" for name, value in zip(names, measured, strict=True)))


def measure_gpu(device: torch.device, num_rounds: int, parts: Sequence[str] = ("kernels", "step")) -> GpuFigures:
    """Measure part by part; a part that fails costs only its own figures, and its traceback goes to standard error.

    The device needs some 20 GB free. `parts` may leave out the kernels or the training steps, whose figures then stay
    None.
    """
    measured = GpuFigures()
    measured.figures["device"] = torch.cuda.get_device_name(device)
    if "kernels" in parts:
        generator = torch.Generator(device).manual_seed(0)
        measured.add(_FLOORS, lambda: _measure_floors(device, generator, num_rounds))
        if not measured.failures:
            copy_rate, d2h_rate = (measured.figures[name] for name in _FLOORS)
            for names, run in _parts(device, generator, copy_rate, d2h_rate, num_rounds):
                measured.add(names, functools.partial(_with_kernels, device, run))
    if "step" in parts:
        for names, step in ((STEP_FIGURES, measure_step), (FUSED_FIGURES, _fused_step)):
            torch.cuda.empty_cache()
            measured.add(names, functools.partial(step, device, min(num_rounds, _MAX_STEP_ROUNDS)))
    return measured


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
        return (of.out.numel() / d2h_rate / _seconds(lambda: of.pack(host), num_rounds),)

    def codes() -> tuple[float, ...]:
        values = rows().values
        packed = quantize(values, "int8")
        num_bytes = rows_bytes + packed.numel()
        shares = share(num_bytes, lambda: quantize(values, "int8"))
        return shares + share(num_bytes, lambda: dequantize(packed, "int8", _DIM))

    drain = "cut_dirty_share", "mark_and_cut_share", "cut_vs_unique"
    return [
        (("pack_rows_share",), lambda: share_of_rows(2 * rows_bytes + 16 * _NUM_IDS, lambda of: of.pack(of.out))),
        (("unpack_rows_share",), lambda: share_of_rows(2 * rows_bytes + 8 * _NUM_IDS, _Rows.unpack)),
        (("row_digests_share",), lambda: share_of_rows(rows_bytes + 16 * _NUM_IDS, _Rows.digest)),
        (("quantize_int8_share", "dequantize_int8_share"), codes),
        (("pack_to_pinned_share_of_d2h",), pack_to_host),
        (drain, lambda: _drain_figures(rows().weights, generator, copy_rate, num_rounds)),
    ]


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

    def unpack(self) -> None:
        unpack_rows(self.weights, self.row_ids, self.values)

    def digest(self) -> None:
        row_digests(self.row_ids, [self.values])


def _measure_floors(device: torch.device, generator: torch.Generator, num_rounds: int) -> tuple[float, float]:
    """Return bytes a second (of a copy on the device, read and written ones; of a copy to pinned memory)."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_(generator=generator)
    target = torch.empty_like(source)
    pinned = torch.empty(_D2H_BYTES, dtype=torch.uint8, pin_memory=True)
    copy_s = _seconds(lambda: target.copy_(source), num_rounds)
    d2h_s = _seconds(lambda: pinned.copy_(source[:_D2H_BYTES], non_blocking=True), num_rounds)
    return 2 * _COPY_BYTES / copy_s, _D2H_BYTES / d2h_s


def _drain_figures(
    weights: torch.Tensor, generator: torch.Generator, copy_rate: float, num_rounds: int
) -> tuple[float, ...]:
    """Return (share of a drain, and of marks and a drain; the speed of both over `torch.unique` and `index_select`)."""
    device, rows, num_ids = weights.device, weights.shape[0] // _NUM_TABLES, _NUM_IDS // _NUM_TABLES
    of_tables = torch.split(weights, rows)[:_NUM_TABLES]
    slots = -(-rows // 64) * 64
    tables = [
        DrainTable(first_slot=number * slots, num_rows=rows, row_offset=0, seed=number, columns=(columns,))
        for number, columns in enumerate(of_tables)
    ]
    plan = DrainPlan(tables, _NUM_SHARDS)
    ids = torch.randint(0, rows, (_NUM_TABLES, num_ids), device=device, generator=generator)
    numbers = torch.arange(_NUM_TABLES, device=device)
    features = torch.arange(_NUM_TABLES + 1, device=device) * num_ids, numbers * slots, torch.full_like(numbers, rows)
    bitmap, cursor = make_bitmap(plan.end_slot, device), torch.zeros(1, dtype=torch.int64, device=device)
    out_bytes = sum(table.packed_bytes(num_ids) for table in plan.tables) + plan.min_out_bytes
    out = torch.empty(out_bytes, dtype=torch.uint8, device=device)
    header = torch.empty(plan.header_words, dtype=torch.int64, device=device)

    def mark() -> None:
        mark_dirty_features(bitmap, ids.view(-1), *features)

    def drain() -> None:
        drain_dirty(bitmap, cursor, plan, out, header)

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
