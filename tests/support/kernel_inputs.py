"""What the tests of the kernels draw: dims, types and rows that meet every access width and its tails."""

from __future__ import annotations

import pytest
import torch
from host_kernels import host_kernels
from hypothesis import settings
from hypothesis import strategies as st
from sanitizers import WATCHER

from headrace.kernels.runtime.cuda_module import Launcher
from headrace.kernels.runtime.dispatch import gpu_module

__all__ = [
    "ALL_WAYS",
    "DIMS",
    "DTYPES",
    "LAUNCHERS",
    "WARP_LAUNCHERS",
    "examples",
    "launcher_of",
    "moved",
    "poisoned",
    "random_rows",
    "same_bits",
]

DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
)
DIMS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 127, 128, 129, 255, 513, 1000, 1023, 1024]))

# The same kernels where they can run: by g++ on the host, and on a GPU where there is one.
LAUNCHERS = [pytest.param("cpu", id="on the host"), pytest.param("cuda", id="on a GPU", marks=pytest.mark.gpu)]
# For kernels that exchange between lanes: (device, lanes of a warp), of which a GPU has as many as it has.
WARP_LAUNCHERS = [
    pytest.param("cpu", 32, id="on the host"),
    pytest.param("cpu", 64, id="on the host, 64 lanes"),
    pytest.param("cuda", 0, id="on a GPU", marks=pytest.mark.gpu),
]

ALL_WAYS = [pytest.param("plain", 0, id="on the CPU"), *WARP_LAUNCHERS]
"""The public function on the CPU, and the kernels."""


def examples(count: int) -> settings:
    """Return settings for this many examples; a quarter under a sanitizer, which looks at every access of each."""
    return settings(max_examples=count if WATCHER is None else count // 4)


def launcher_of(family: str, device: str, lanes: int = 32) -> Launcher:
    """Return what launches a family's kernels for tensors on a device; `lanes` of a warp, where the host plays it."""
    if device == "cpu":
        return host_kernels(family, lanes)
    return gpu_module(family, torch.device("cuda", torch.cuda.current_device()))


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def moved(source: torch.Tensor, device: str) -> torch.Tensor:
    """Return it on a device with the same strides and the same place in its memory; a copy where it is another."""
    there = torch.empty(0, dtype=source.dtype, device=device)
    return there.set_(
        source.untyped_storage().to(device=device), source.storage_offset(), source.shape, source.stride()
    )


def poisoned(num_bytes: int) -> torch.Tensor:
    """Return bytes that show what was not written; aligned to 64, and no byte more, so that memcheck sees their end."""
    memory = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
    assert memory.data_ptr() % 64 == 0  # torch aligns all memory of the CPU so
    return memory


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are the same type, shape and bits, wherever they are."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # An empty tensor may have strides that cannot be viewed as bytes.
    left, right = left.cpu().contiguous(), right.cpu().contiguous()
    return not left.numel() or torch.equal(left.view(torch.uint8), right.view(torch.uint8))
