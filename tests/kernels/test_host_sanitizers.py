"""What holds the kernels where there is no GPU: memcheck and racecheck on the host; and that they find faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_kernels import edited_kernels, host_kernels
from sanitizers import MEMCHECK, RACECHECK, run_watched

from headrace.kernels.dirty_bitmap import launch_take_dirty, make_bitmap

_HERE = Path(__file__).resolve().parent
_FAMILIES = [
    str(_HERE / f"test_{name}.py")
    for name in ("dirty_bitmap", "bucketize", "dirty_drain", "quantization", "digests", "packing")
]
_PLANTED = str(_HERE / "planted_faults.py")


@pytest.mark.timeout(240)
def test_memcheck(tmp_path: Path) -> None:
    """No kernel reads or writes beyond a tensor, a part of the scratch memory, or shared memory; planted ones do."""
    assert run_watched(MEMCHECK, tmp_path / "log", *_FAMILIES, _PLANTED, "-k", "host or sanitizer") > 30


@pytest.mark.timeout(240)
def test_racecheck(tmp_path: Path) -> None:
    """No two threads of a kernel's race, be they of a block or of several; those of planted races do."""
    assert run_watched(RACECHECK, tmp_path / "log", *_FAMILIES, _PLANTED, "-k", "(host and blocks) or sanitizer") > 20


def test_a_kernel_that_counts_on_the_order_of_blocks_is_stuck(tmp_path: Path) -> None:
    """Blocks may begin in any order: one that waits for that of a lower number, not for an earlier one, is found."""
    ticket = "shared_tile = atomicAdd(&progress[num_tiles], 1ull);"

    def without_ticket(text: str) -> str:
        assert text.count(ticket) == 1
        return text.replace(ticket, "shared_tile = blockIdx.x;")

    launch_take_dirty(host_kernels("bitmap"), make_bitmap(2 * 65_536), 10)
    with pytest.raises(AssertionError, match="wait for others that do not come"):
        launch_take_dirty(edited_kernels(tmp_path, "bitmap", "bitmap.cu", without_ticket), make_bitmap(2 * 65_536), 10)
