"""Faults planted in copies of the kernels, each of which its sanitizer finds. Run by `test_host_sanitizers.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from host_kernels import edited_kernels, host_kernels
from sanitizers import MEMCHECK, RACECHECK, WATCHER, Sanitizer, gxx_version

from headrace.kernels.bucketize import launch_block_bucketize
from headrace.kernels.dirty_bitmap import launch_mark_dirty, launch_take_dirty, make_bitmap
from headrace.kernels.dirty_drain import DrainPlan, DrainTable, header_words, launch_drain_dirty
from headrace.kernels.packing import launch_pack_rows
from headrace.kernels.quantization import launch_quantize
from headrace.kernels.runtime.cuda_module import Launcher


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """One edit of a source, and what shows it.

    Attributes:
        name: What is wrong then.
        finder: Which sanitizer finds it.
        family: Of the kernels.
        file: The source that is edited, where `old` is once and becomes `new`.
        run: Runs kernels in which it shows.
        found: What the sanitizer says, as a pattern.
        newest_gxx: Last version of g++ whose sanitizer finds it, of those that were tried: 12 and 14.
    """

    name: str
    finder: Sanitizer
    family: str
    file: str
    old: str
    new: str
    run: Callable[[Launcher], object]
    found: str
    newest_gxx: int = 14


def _take(launcher: Launcher) -> None:
    """Two tiles, the last of which ends in the middle of a thread's words."""
    bitmap = make_bitmap(65_536 + 64 * 10 + 5)
    bitmap[:] = 5
    launch_take_dirty(launcher, bitmap, 10_000)


def _take_more_than_is_staged(launcher: Launcher) -> None:
    bitmap = make_bitmap(65_536)
    bitmap[:] = -1
    launch_take_dirty(launcher, bitmap, 10_000)


def _mark(launcher: Launcher) -> None:
    """Two blocks, and the same word in both."""
    launch_mark_dirty(launcher, make_bitmap(64), torch.arange(300) % 40)


def _bucketize(launcher: Launcher) -> None:
    launch_block_bucketize(launcher, torch.arange(100), 3, 0, 1, torch.empty(0), torch.empty(0, dtype=torch.int32))


def _cut(launcher: Launcher) -> None:
    table = DrainTable(first_slot=0, num_rows=100, row_offset=0, seed=1, columns=(torch.zeros(100, 1),))
    plan, bitmap = DrainPlan([table], 1), make_bitmap(128)
    out, header = torch.empty(4096, dtype=torch.uint8), torch.zeros(header_words(1, 1), dtype=torch.int64)
    launchers, cursor = (launcher, host_kernels("row_packing")), torch.tensor([0])
    launch_drain_dirty(launchers, bitmap, cursor, plan.numbers, 1, plan.owners, plan.descriptors, out, header)


def _pack(launcher: Launcher) -> None:
    """Nine bytes: a column that is no whole unit."""
    table, out = torch.zeros(5, 3, dtype=torch.uint8), torch.empty(128, dtype=torch.uint8)
    launch_pack_rows(launcher, [table], [torch.arange(3)], [1], [0], out)


def _quantize(launcher: Launcher) -> None:
    launch_quantize(launcher, torch.zeros(3, 5), "int8")


_FAULTS = (
    _Fault(
        name="shared memory is written again while others still read it",
        finder=RACECHECK,
        family="dirty_drain",
        file="block_sums.cuh",
        old="    __syncthreads();  // the next call writes them again\n",
        new="",
        run=_cut,
        found="plan_drain_kernel: .*data race",
        newest_gxx=12,
    ),
    _Fault(
        name="a lane writes what the others of its warp have not read yet",
        finder=RACECHECK,
        family="bucketize",
        file="shards.cuh",
        old="    sync_warp();  // every lane has read before one writes\n",
        new="",
        run=_bucketize,
        found="move_to_shards_kernel: .*data race",
    ),
    _Fault(
        name="lanes count without an atomic",
        finder=RACECHECK,
        family="bucketize",
        file="bucketize.cu",
        old="atomicAdd(&mine[shard_of(row_ids[i], routing)], 1u);",
        new="++mine[shard_of(row_ids[i], routing)];",
        run=_bucketize,
        found="count_shards_kernel: .*data race",
    ),
    _Fault(
        name="a plain read of a word that other blocks mark",
        finder=RACECHECK,
        family="bitmap",
        file="bitmap.cu",
        old="load_relaxed(&halves[row / 32])",
        new="halves[row / 32]",
        run=_mark,
        found="mark_dirty_int64_kernel: .*data race",
    ),
    _Fault(
        name="staged rows are written again while others still read them",
        finder=RACECHECK,
        family="bitmap",
        file="dirty_words.cuh",
        old="        __syncthreads();  // the next part reuses it\n",
        new="",
        run=_take_more_than_is_staged,
        found="take_dirty_kernel: .*data race",
    ),
    _Fault(
        name="a block reads rows that another one has told the number of, which orders nothing",
        finder=RACECHECK,
        family="bitmap",
        file="bitmap.cu",
        old="if (tile == num_tiles - 1 && threadIdx.x == 0) *count",
        new="if (tile == num_tiles - 1 && threadIdx.x == 0) row_ids[start] = row_ids[0], *count",
        run=_take,
        found="take_dirty_kernel: .*data race",
        newest_gxx=12,
    ),
    _Fault(
        name="ids are read behind the last one",
        finder=MEMCHECK,
        family="row_packing",
        file="row_packing.cu",
        old="            if (k >= left) continue;\n",
        new="",
        run=_pack,
        found="pack_rows_kernel: .*heap-buffer-overflow.*READ of size 8",
    ),
    _Fault(
        name="a byte is written behind the last row",
        finder=MEMCHECK,
        family="quantize",
        file="quantize.cu",
        old="scaling.bias_bits, SCALE_BYTES);",
        new="scaling.bias_bits, SCALE_BYTES + 1);",
        run=_quantize,
        found="quantize_int8_kernel: .*heap-buffer-overflow.*WRITE of size 1",
    ),
    _Fault(
        name="shared memory is too short by one",
        finder=MEMCHECK,
        family="bitmap",
        file="block_sums.cuh",
        old="__shared__ Value warp_sums[WARPS];",
        new="__shared__ Value warp_sums[WARPS - 1];",
        run=_take,
        found="take_dirty_kernel: .*index 7 out of bounds",
    ),
)


@pytest.mark.parametrize("fault", [fault for fault in _FAULTS if fault.finder is WATCHER], ids=lambda fault: fault.name)
def test_the_sanitizer_finds(fault: _Fault, tmp_path: Path) -> None:
    """It finds nothing in the kernels as they are, and the fault once it is planted."""
    fault.run(host_kernels(fault.family))
    if gxx_version() > fault.newest_gxx:
        pytest.skip(f"g++ {fault.newest_gxx} finds it, this one may not")

    def plant(text: str) -> str:
        assert text.count(fault.old) == 1
        return text.replace(fault.old, fault.new)

    with pytest.raises(AssertionError, match=f"(?s){fault.found}"):
        fault.run(edited_kernels(tmp_path, fault.family, fault.file, plant))
