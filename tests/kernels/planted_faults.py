"""Faults planted in copies of the kernels, each of which its sanitizer finds. Run by `test_host_sanitizers.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

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


class _Fault(NamedTuple):
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
    launch_block_bucketize(launcher, torch.arange(100), 3, 0, 1, torch.empty(0))


def _cut(launcher: Launcher) -> None:
    table = DrainTable(first_slot=0, num_rows=100, row_offset=0, seed=1, columns=(torch.zeros(100, 1),))
    plan, bitmap = DrainPlan([table], 1), make_bitmap(128)
    out, header = torch.empty(4096, dtype=torch.uint8), torch.zeros(header_words(1, 1), dtype=torch.int64)
    launchers, cursor = (launcher, host_kernels("row_packing")), torch.tensor([0])
    launch_drain_dirty(launchers, bitmap, cursor, plan.numbers, 1, plan.descriptors, out, header)


def _pack(launcher: Launcher) -> None:
    """Nine bytes: a column that is no whole unit."""
    table, out = torch.zeros(5, 3, dtype=torch.uint8), torch.empty(128, dtype=torch.uint8)
    launch_pack_rows(launcher, [table], [torch.arange(3)], [1], [0], out)


def _quantize(launcher: Launcher) -> None:
    launch_quantize(launcher, torch.zeros(3, 5), "int8")


_IF_LAST = "if (tile == num_tiles - 1 && threadIdx.x == 0) "
# fmt: off
_FAULTS = (
    _Fault("shared memory is written again while others still read it", RACECHECK, "dirty_drain", "block_sums.cuh",
           "    __syncthreads();  // the next call writes them again\n", "", _cut,
           "plan_drain_kernel: .*data race", 12),
    _Fault("a lane writes what the others of its warp have not read yet", RACECHECK, "bucketize", "shards.cuh",
           "    sync_warp();  // every lane has read before one writes\n", "", _bucketize,
           "move_to_shards_kernel: .*data race"),
    _Fault("lanes count without an atomic", RACECHECK, "bucketize", "bucketize.cu",
           "atomicAdd(&mine[shard_of(row_ids[i], routing)], 1u);", "++mine[shard_of(row_ids[i], routing)];", _bucketize,
           "count_shards_kernel: .*data race"),
    _Fault("a plain read of a word that other blocks mark", RACECHECK, "bitmap", "bitmap.cu",
           "load_relaxed(&halves[row / 32])", "halves[row / 32]", _mark, "mark_dirty_int64_kernel: .*data race"),
    _Fault("staged rows are written again while others still read them", RACECHECK, "bitmap", "dirty_words.cuh",
           "        __syncthreads();  // the next part reuses it\n", "", _take_more_than_is_staged,
           "take_dirty_kernel: .*data race"),
    _Fault("a block reads rows that another one has told the number of, which orders nothing", RACECHECK, "bitmap",
           "bitmap.cu", f"{_IF_LAST}*count", f"{_IF_LAST}row_ids[start] = row_ids[0], *count", _take,
           "take_dirty_kernel: .*data race", 12),
    _Fault("ids are read behind the last one", MEMCHECK, "row_packing", "row_packing.cu",
           "            if (k >= left) continue;\n", "", _pack,
           "pack_rows_kernel: .*heap-buffer-overflow.*READ of size 8"),
    _Fault("a byte is written behind the last row", MEMCHECK, "quantize", "quantize.cu",
           "scaling.bias_bits, SCALE_BYTES);", "scaling.bias_bits, SCALE_BYTES + 1);", _quantize,
           "quantize_int8_kernel: .*heap-buffer-overflow.*WRITE of size 1"),
    _Fault("shared memory is too short by one", MEMCHECK, "bitmap", "block_sums.cuh",
           "__shared__ Value warp_sums[WARPS];", "__shared__ Value warp_sums[WARPS - 1];", _take,
           "take_dirty_kernel: .*index 7 out of bounds"),
)
# fmt: on


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
