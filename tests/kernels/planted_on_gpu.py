"""A fault in a kernel on a GPU, which a tool of compute-sanitizer has to find. Run by `scripts/check-gpu`.

    compute-sanitizer --tool TOOL python tests/kernels/planted_on_gpu.py TOOL

The exit code is 0 also when the tool has stopped the kernel: what it has found is in its summary.
"""

from __future__ import annotations

import sys

import torch

from headrace.kernels.dirty_bitmap import launch_take_dirty, make_bitmap
from headrace.kernels.runtime import cuda_module
from headrace.kernels.runtime.dispatch import gpu_module

_BARRIER = "__syncthreads();"


def _read_beyond_a_tensor(device: torch.device) -> None:
    """memcheck: a kernel is told of more ids than there are."""
    bitmap, ids = make_bitmap(64, device), torch.zeros(64, dtype=torch.int64, device=device)
    arguments = (bitmap, bitmap.numel(), ids, ids.numel() + 32)
    gpu_module("bitmap", device).launch("mark_dirty_int64_kernel", 1, 256, *arguments)


def _race_for_sums(device: torch.device) -> None:
    """racecheck: a block's warps do not wait for each other's sums."""
    source, headers = cuda_module.source_of("bitmap")
    text = headers["block_sums.cuh"].decode()
    assert _BARRIER in text
    headers["block_sums.cuh"] = text.replace(_BARRIER, "").encode()
    cuda_module.source_of = lambda family: (source, headers)
    bitmap = make_bitmap(65_536, device)
    bitmap.fill_(5)
    launch_take_dirty(gpu_module("bitmap", device), bitmap, 65_536)


if __name__ == "__main__":
    planted = {"memcheck": _read_beyond_a_tensor, "racecheck": _race_for_sums}[sys.argv[1]]
    planted(torch.device("cuda", torch.cuda.current_device()))
    try:
        torch.cuda.synchronize()
    except RuntimeError as exc:
        print(f"the kernel was stopped: {exc}".partition("\n")[0])
    else:
        print("the kernel has run to its end")
