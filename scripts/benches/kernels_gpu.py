"""The GPU's part of `headrace bench kernels`: how near each kernel comes to what its memory can do.

A share is the time that the fewest bytes would take at the bandwidth of a plain copy, over the time of the kernel. Each
input is read once and each output written once. The bandwidths are measured in the same run.

`step_time_ratio_gpu` is what streaming from a GPU costs a training step. A model of plain tables is trained on one GPU
with sparse gradients, in turns with and without a streamer that packs its tables there and sends to a server of one
shard on the same machine. The time is the clock's over many steps, with the GPU idle before and after: what a step
waits for counts, and what the GPU does besides. The dense layers multiply as float32 (torch's precision "highest"),
which may hide the host's time, and as TF32 ("high"), where steps are short.
"""

from __future__ import annotations

import functools
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
from torch import nn

from headrace.kernels.bucketize import block_bucketize
from headrace.kernels.digests import row_digests
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty, mark_dirty_features, take_dirty
from headrace.kernels.dirty_drain import DrainPlan, DrainTable, drain_dirty
from headrace.kernels.packing import layout_of, pack_rows, unpack_rows
from headrace.kernels.quantization import dequantize, quantize
from headrace.kernels.runtime.cuda_module import FAMILIES
from headrace.kernels.runtime.dispatch import gpu_module
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.harness import Rounds
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.device.dirty_rows import DeviceDirtyRows

__all__ = ["GPU_FIGURES", "STEP_FIGURES", "GpuFigures", "measure_gpu", "measure_step"]

# A bitmap of twice the L2 cache of an H200, whose time is that of many launches.
_NUM_ROWS, _NUM_MARKED = 1_000_000_000, 10_000_000
_FLUSHED_BYTES = 2**28
_TABLE_ROWS, _DIM, _NUM_IDS = 4_000_000, 128, 1_000_000
_NUM_TABLES, _NUM_SHARDS = 26, 8
# Rows of 8 bytes: with fewer of them launches would be timed, not memory.
_NUM_BUCKETIZED = 16_000_000
_COPY_BYTES, _D2H_BYTES = 2**31, 2**28
_WARM_UPS = 3
_WAIT_CYCLES = 2_000_000
_ROW_BYTES = 4 * _DIM

# The step's model: rows and columns of a table, samples of a batch, ids of a bag; dense layers; steps of a turn.
_STEP_ROWS, _STEP_DIM, _BATCH, _BAG = 1_000_000, 64, 4096, 4
_HIDDEN, _NUM_LAYERS = 4096, 4
_NUM_STEPS, _NUM_WARM_UPS = 50, 10
_PRECISIONS = ("highest", "high")
_MAX_STEP_ROUNDS = 3  # in each the server writes gigabytes of rows to disk

STEP_FIGURES: Final = (
    "step_time_ratio_gpu",
    *(f"step_time_ratio_gpu_{precision}" for precision in _PRECISIONS),
    *(f"step_ms_gpu_{precision}" for precision in _PRECISIONS),
)
"""What `measure_step` returns, in its order."""

GPU_FIGURES: Final = (
    "device",
    "device_copy_bytes_per_s",
    "pinned_d2h_bytes_per_s",
    "mark_dirty_ids_per_s",
    "take_dirty_share",
    "pack_rows_share",
    "unpack_rows_share",
    "row_digests_share",
    "bucketize_share",
    "quantize_int8_share",
    "dequantize_int8_share",
    "pack_and_d2h_share_of_d2h",
    "pack_to_pinned_share_of_d2h",
    "cut_dirty_share",
    "cut_vs_unique",
    *STEP_FIGURES,
)
"""What `measure_gpu` measures; all null without a GPU."""


@dataclass(kw_only=True, slots=True)
class GpuFigures:
    """The figures of `GPU_FIGURES`, None if not measured, and the reason for each whose part failed."""

    figures: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(GPU_FIGURES))
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, names: tuple[str, ...], run: Callable[[], tuple[float, ...]]) -> None:
        """Measure one part; keep its figures, or why there are none."""
        try:
            measured = run()
        except Exception as exc:
            traceback.print_exc()
            self.failures.update(dict.fromkeys(names, f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"))
        else:
            self.figures.update(zip(names, measured, strict=True))


def measure_gpu(
    device: torch.device, num_rounds: int, keep: Callable[[GpuFigures], None] = lambda measured: None
) -> GpuFigures:
    """Measure part by part; a part that fails costs only its own figures, and its traceback goes to standard error.

    The device needs some 16 GB free. `keep` is called with the figures so far after each part: a later one may never
    end.
    """
    measured = GpuFigures()
    measured.figures["device"] = torch.cuda.get_device_name(device)
    generator = torch.Generator(device).manual_seed(0)
    floors = "device_copy_bytes_per_s", "pinned_d2h_bytes_per_s"
    measured.add(floors, lambda: _floors(device, generator, num_rounds))
    keep(measured)
    if not measured.failures:
        copy_rate, d2h_rate = (measured.figures[name] for name in floors)
        for names, run in _parts(device, generator, copy_rate, d2h_rate, num_rounds):
            measured.add(names, functools.partial(_with_kernels, device, run))
            keep(measured)
    measured.add(STEP_FIGURES, lambda: measure_step(device, min(num_rounds, _MAX_STEP_ROUNDS)))
    return measured


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

    bitmap, drain = ("mark_dirty_ids_per_s", "take_dirty_share"), ("cut_dirty_share", "cut_vs_unique")
    return [
        (bitmap, lambda: _bitmap_figures(device, generator, copy_rate, num_rounds)),
        (("pack_rows_share",), lambda: share_of_rows(2 * rows_bytes + 16 * _NUM_IDS, lambda of: of.pack(of.out))),
        (("unpack_rows_share",), lambda: share_of_rows(2 * rows_bytes + 8 * _NUM_IDS, unpack)),
        (("row_digests_share",), lambda: share_of_rows(rows_bytes + 16 * _NUM_IDS, digest)),
        (("bucketize_share",), bucketize),
        (("quantize_int8_share", "dequantize_int8_share"), codes),
        (("pack_and_d2h_share_of_d2h", "pack_to_pinned_share_of_d2h"), pack_to_host),
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
) -> tuple[float, float]:
    """Return (ids marked a second, share of take)."""
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
    return _NUM_MARKED / mark_s, (2 * bitmap.numel() * 8 + 8 * num_dirty) / copy_rate / take_s


def _drain_figures(
    weights: torch.Tensor, generator: torch.Generator, copy_rate: float, num_rounds: int
) -> tuple[float, float]:
    """Return (share of a drain; speed of marks and a drain over `torch.unique` and `index_select` of each table)."""
    device, rows, num_ids = weights.device, weights.shape[0] // _NUM_TABLES, _NUM_IDS // _NUM_TABLES
    of_tables = torch.split(weights, rows)[:_NUM_TABLES]
    slots = -(-rows // 64) * 64
    plan = DrainPlan(
        [
            DrainTable(first_slot=number * slots, num_rows=rows, row_offset=0, seed=number, columns=(columns,))
            for number, columns in enumerate(of_tables)
        ],
        _NUM_SHARDS,
    )
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
    return (
        num_bytes / copy_rate / drain_s,
        _seconds(unique_and_select, num_rounds) / _seconds(mark_and_drain, num_rounds),
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


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(_STEP_ROWS, _STEP_DIM, mode="sum", sparse=True) for _ in range(_NUM_TABLES)
        )
        widths = [_NUM_TABLES * _STEP_DIM, *[_HIDDEN] * _NUM_LAYERS, 1]
        self.dense = nn.Sequential(*map(nn.Linear, widths, widths[1:]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled = [table(of_table) for table, of_table in zip(self.tables, ids, strict=True)]
        output: torch.Tensor = self.dense(torch.cat(pooled, dim=1))
        return output


def measure_step(device: torch.device, num_rounds: int) -> tuple[float, ...]:
    """Return the figures of `STEP_FIGURES`; needs some 10 GB of device memory, and 8 GB of temporary files at a time.

    These are the median time of a step with streaming over the median without, the greater one of both precisions and
    that of each; and the median without, milliseconds, of each precision.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = _Model()
        batches = torch.randint(0, _STEP_ROWS, (8, _NUM_TABLES, _BATCH, _BAG))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(num_steps: int) -> float:
        """Return the seconds of steps."""
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        for number in range(num_steps):
            optimizer.zero_grad()
            model(batches[number % len(batches)]).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin_s

    def train_streamed() -> float:
        """Return the seconds of steps whose rows are streamed."""
        # A new server each time, and no flush at the end: the files of all rounds would take tens of gigabytes.
        with (
            tempfile.TemporaryDirectory() as folder,
            ServerProcess.start(Path(folder), shards=1) as server,
            RawEmbeddingStreamer(server.address, run="bench", device_pipeline=True) as streamer,
        ):
            streamer.attach(model, optimizer)
            if by_host := [table.spec.fqn for table in streamer.tables if not isinstance(table.dirty, DeviceDirtyRows)]:
                raise UnavailableError(f"the host would gather {first_of(by_host)}: the log says why")
            train(_NUM_WARM_UPS)
            streamed_s = train(_NUM_STEPS)
            streamer.close(flush=False)
            return streamed_s

    plain_s, streamed_s = Rounds(), Rounds()
    precision_before = torch.get_float32_matmul_precision()
    try:
        for _ in range(num_rounds):
            for precision in _PRECISIONS:
                torch.set_float32_matmul_precision(precision)
                train(_NUM_WARM_UPS)
                plain_s.add(precision, train(_NUM_STEPS))
                streamed_s.add(precision, train_streamed())
    finally:
        torch.set_float32_matmul_precision(precision_before)
    plain, streamed = plain_s.medians(1e3 / _NUM_STEPS), streamed_s.medians(1e3 / _NUM_STEPS)
    ratios = [streamed[precision] / plain[precision] for precision in _PRECISIONS]
    return max(ratios), *ratios, *plain.values()
