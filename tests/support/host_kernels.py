"""Kernels that run on the host: the CUDA sources compiled by g++ with `cuda_on_host.h`."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import headrace.kernels.cuda as sources

_HERE = Path(__file__).resolve().parent
_SOURCES = Path(sources.__file__).resolve().parent
_MAX_ARGUMENTS = 12
# -fwrapv and no strict aliasing: as nvcc treats them. No contraction: as NVRTC is told.
_FLAGS = (
    "-O1",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-Wno-unknown-pragmas",
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
)


class HostKernels:
    """A `Launcher` of one family for tensors on the CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def launch(self, kernel: str, blocks: int, threads: int, *args: torch.Tensor | int) -> None:
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg % 2**64 for arg in args]
        assert len(values) <= _MAX_ARGUMENTS
        packed = (ctypes.c_uint64 * _MAX_ARGUMENTS)(*values)
        function = ctypes.cast(getattr(self._library, kernel), ctypes.c_void_p)
        failure = self._library.launch_on_host(function, blocks, threads, packed)
        if failure == 1:
            raise IndexError(f"{kernel} has stopped with a trap")
        assert failure != 3, f"{kernel}: an access is not aligned"
        assert not failure, f"{kernel}: threads wait for others that do not come"


@functools.cache
def _build(family: str, lanes: int) -> HostKernels:
    with tempfile.TemporaryDirectory(prefix="host-kernels-") as folder:
        library = Path(folder) / f"{family}.so"
        source = (
            f"-DHEADRACE_WARP_LANES={lanes}",
            "-x",
            "c++",
            "-include",
            _HERE / "cuda_on_host.h",
            _SOURCES / f"{family}.cu",
        )
        done = subprocess.run(["g++", *_FLAGS, *source, "-o", library], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return HostKernels(ctypes.CDLL(str(library)))  # stays loaded when the file is gone


def host_kernels(family: str, lanes: int = 32) -> HostKernels:
    """Return a family's kernels, compiled once a process; skips the test where there is no g++.

    Args:
        family: One of `FAMILIES`.
        lanes: Of a warp: 32, or 64 as most of AMD's GPUs have it.
    """
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels cannot be run on the host")
    return _build(family, lanes)
