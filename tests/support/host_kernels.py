"""Kernels that run on the host: CUDA sources, compiled by g++ with `cuda_on_host.h` and run by `cuda_on_host.cpp`."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sanitizers import WATCHER, new_findings, without_sanitizer

from headrace.kernels.runtime import cuda_module

__all__ = ["HostKernels", "edited_kernels", "host_kernels"]

_HERE = Path(__file__).resolve().parent
_SOURCES = Path(cuda_module.__file__).resolve().parent / "cuda"
_MAX_ARGUMENTS = 66
_COMMON_FLAGS = ("-O1", "-std=c++17", "-fPIC", "-fvisibility=hidden", *(WATCHER.engine_flags if WATCHER else ()))
# -fwrapv and no strict aliasing: as nvcc treats them. No contraction: as NVRTC is told.
_KERNEL_FLAGS = ("-shared", "-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-unknown-pragmas")
_WATCHED_FLAGS = WATCHER.flags if WATCHER else ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")


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
        found = new_findings() if WATCHER else ""
        assert not found, f"{kernel}: {found}"
        if failure == 1:
            raise IndexError(f"{kernel} has stopped with a trap")
        assert failure != 3, f"{kernel}: an access is not aligned"
        assert not failure, f"{kernel}: threads wait for others that do not come"


def host_kernels(family: str, lanes: int = 32) -> HostKernels:
    """Return a family's kernels, compiled once a process; skips the test where there is no g++.

    Args:
        family: One of `FAMILIES`.
        lanes: Of a warp: 32, or 64 as most of AMD's GPUs have it.
    """
    return _build(family, lanes, _SOURCES)


def edited_kernels(folder: Path, family: str, file: str, edit: Callable[[str], str]) -> HostKernels:
    """Return a family's kernels with a fault, for tests of what finds faults.

    Args:
        folder: An empty one, for the sources.
        family: One of `FAMILIES`.
        file: Of the source that is changed.
        edit: Returns its new text.
    """
    for source in _SOURCES.glob("*.cu*"):
        text = source.read_text()
        (folder / source.name).write_text(edit(text) if source.name == file else text)
    return _build(family, 32, folder)


@functools.cache
def _build(family: str, lanes: int, folder: Path) -> HostKernels:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels cannot be run on the host")
    header = ("-x", "c++", "-include", _HERE / "cuda_on_host.h")
    flags = (*_COMMON_FLAGS, *_KERNEL_FLAGS, *_WATCHED_FLAGS)
    library = _compile(lanes, "so", *flags, *header, folder / f"{family}.cu", "-x", "none", _engine(lanes))
    return HostKernels(ctypes.CDLL(str(library)))


@functools.cache
def _engine(lanes: int) -> Path:
    """Return the object that runs kernels; never with a sanitizer, which is to watch the kernels alone."""
    return _compile(lanes, "o", *_COMMON_FLAGS, "-c", _HERE / "cuda_on_host.cpp")


@functools.cache
def _built() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that is there as long as the process: a sanitizer reads functions' names from what is loaded."""
    return tempfile.TemporaryDirectory(prefix="host-kernels-")


def _compile(lanes: int, ending: str, *args: str | Path) -> Path:
    folder = Path(_built().name)
    path = folder / f"{len(list(folder.iterdir()))}.{ending}"
    command = ["g++", f"-DHEADRACE_WARP_LANES={lanes}", *args, "-o", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=without_sanitizer())
    assert done.returncode == 0, done.stderr
    return path
