"""CUDA C++ kernels, compiled at run time: NVRTC compiles for the GPU at hand, and the driver loads the binary.

A pip install needs no compiler, only the packages of the extra `cuda`, which are imported when a kernel is first
needed. If that fails, `KernelsUnavailableError` says why, and operations use torch's own.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch

from headrace.schemas.extras import install_command

__all__ = [
    "FAMILIES",
    "BinaryCache",
    "CudaModule",
    "KernelsUnavailableError",
    "Launcher",
    "binary_key",
    "compile_family",
    "exchange_capture_mode",
    "num_blocks",
    "signed",
]

FAMILIES = ("bitmap", "bucketize", "dirty_drain", "quantize", "row_digests", "row_packing")
"""Names of the files in `kernels/runtime/cuda`, without `.cu`."""

_logger = logging.getLogger(__name__)
# Without contraction to fused multiply-adds, quantized rows are the same bytes as on a CPU.
_OPTIONS = ("--std=c++17", "--fmad=false")
_MAX_BLOCKS = 2**16
_DIGEST_BYTES = hashlib.sha256().digest_size
_Argument = torch.Tensor | int


class KernelsUnavailableError(RuntimeError):
    """Kernels cannot be compiled or loaded on this machine; the message says why and how to fix it."""


class Launcher(Protocol):
    """Launches the kernels of one family."""

    def launch(self, kernel: str, blocks: int, threads: int, *args: _Argument) -> None:
        """Queue a kernel on the current stream, without waiting.

        Args:
            kernel: Its name, which ends in `_kernel`.
            blocks: Blocks of the grid; 0 launches nothing.
            threads: Threads per block.
            *args: The kernel's parameters: tensors on its device, passed by address, and integers from -2⁶³ to 2⁶⁴ - 1.
        """


def num_blocks(num_items: int, items_per_block: int) -> int:
    """Return the size of a grid, at most 2¹⁶ blocks; with more items, its threads process several each."""
    return min(_MAX_BLOCKS, -(-num_items // items_per_block))


def signed(value: int) -> int:
    """Return the signed 64-bit number with the same lowest 64 bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def binary_key(parts: Sequence[bytes]) -> str:
    """Return 64 hexadecimal digits that stand for a binary's inputs, including how they are divided into parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


class BinaryCache:
    """Compiled kernels on disk, so that only the first process of a user compiles them.

    A file holds a binary behind its SHA-256. Its name is the `binary_key` of everything that decides the binary:
    source, headers, architecture, options and compiler version. Truncated or damaged files are ignored. Files are
    renamed into place, so processes that start together never read half of one. The folder is never cleaned: a binary
    takes about 50 KB, and a version has few.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Use a folder; None for `headrace/kernels` under `$XDG_CACHE_HOME` or `~/.cache`."""
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self._folder = folder or Path(home).expanduser() / "headrace" / "kernels"

    def get(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return the file of this name, or make it and keep it; log if the folder cannot be used."""
        path = self._folder / name
        try:
            content = path.read_bytes()
        except OSError as exc:
            content = b""
            if not isinstance(exc, FileNotFoundError):
                _logger.warning("compiled kernels cannot be read from %s: %s", path, exc.strerror)
        digest, binary = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if binary and hashlib.sha256(binary).digest() == digest:
            return binary
        binary = make()
        try:
            self._write(path, binary)
        except OSError as exc:
            _logger.warning("compiled kernels cannot be kept in %s: %s", self._folder, exc.strerror)
        return binary

    def _write(self, path: Path, binary: bytes) -> None:
        # Readable by this user only, because these files are executed.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, aside = tempfile.mkstemp(dir=self._folder, prefix=path.stem[:8])
        try:
            with open(number, "wb") as file:
                file.write(hashlib.sha256(binary).digest() + binary)
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise


def source_of(family: str) -> tuple[bytes, dict[str, bytes]]:
    """Return (source of a family, all headers by name, sorted by name)."""
    folder = resources.files("headrace.kernels.runtime") / "cuda"
    headers = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(".cuh")}
    return folder.joinpath(f"{family}.cu").read_bytes(), dict(sorted(headers.items()))


def compile_family(family: str, architecture: str, cache: BinaryCache) -> bytes:
    """Return the binary of one of `FAMILIES` for an architecture such as `sm_90`; needs no GPU.

    If the compiler does not know the architecture, the binary is PTX of the newest older one that it knows. The driver
    compiles it, since PTX is valid for all later architectures. The log says so.

    Raises:
        KernelsUnavailableError: The compiler is not installed, or does not know the architecture.
    """
    nvrtc = _import("nvrtc")
    try:
        version = _checked(nvrtc, nvrtc.nvrtcVersion())
        known = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    except RuntimeError as exc:  # cuda-bindings is installed, the library is not
        raise KernelsUnavailableError(f"NVRTC cannot be loaded ({exc}): {install_command('cuda')}") from exc
    number, target = int(architecture.removeprefix("sm_")), architecture
    older = [each for each in known if each < number]
    is_ptx = number not in known and bool(older)
    if is_ptx:
        target = f"compute_{max(older)}"
        _logger.info("NVRTC %d.%d does not know %s: %s.cu as PTX of %s", *version, architecture, family, target)
    source, headers = source_of(family)
    options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture={target}")]
    key = binary_key([source, *headers.values(), *options, repr(version).encode()])
    kind = "PTX" if is_ptx else "CUBIN"
    return cache.get(f"{key}.{kind.lower()}", lambda: _compile(nvrtc, family, source, headers, options, kind))


def _compile(
    nvrtc: Any, family: str, source: bytes, headers: dict[str, bytes], options: list[bytes], kind: str
) -> bytes:
    names = [name.encode() for name in headers]
    created = nvrtc.nvrtcCreateProgram(source, f"{family}.cu".encode(), len(names), list(headers.values()), names)
    program = _checked(nvrtc, created)
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            # One byte more than is written, because NVRTC writes into it and Python shares strings of one byte.
            log = b" " * (_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)) + 1)
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            output = log.partition(b"\0")[0].decode().strip()
            raise KernelsUnavailableError(f"{family}.cu does not compile with {options[-1].decode()}: {output}")
        binary: bytes = b" " * _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
        _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, binary))
        return binary
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class CudaModule:
    """The kernels of one family on one NVIDIA GPU; a `Launcher`.

    Thread: any; kernels run on the calling thread's current stream.
    """

    def __init__(self, family: str, device: torch.device, cache: BinaryCache) -> None:
        """Compile and load one of `FAMILIES` for a CUDA device with its index.

        Raises:
            KernelsUnavailableError: They cannot be compiled or loaded.
        """
        self._driver = _import("driver")
        self._device = device
        major, minor = torch.cuda.get_device_capability(device)
        binary = compile_family(family, f"sm_{major}{minor}", cache)
        try:
            # The device's primary context, which torch uses; like torch, keep it until the process ends.
            self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device.index))
            self._call("cuCtxPushCurrent", self._context)
            try:
                self._module = self._call("cuModuleLoadData", binary)
            finally:
                self._call("cuCtxPopCurrent")
        except RuntimeError as exc:
            raise KernelsUnavailableError(f"{family}.cu cannot be loaded: {exc}") from exc
        self._functions: dict[str, Any] = {}

    def launch(self, kernel: str, blocks: int, threads: int, *args: _Argument) -> None:
        """See `Launcher.launch`.

        Raises:
            RuntimeError: The driver refuses, or a kernel before this one has failed.
        """
        if not blocks:
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        # As signed 64-bit numbers with the bits of the address or unsigned number.
        values = tuple([signed(arg) if isinstance(arg, int) else arg.data_ptr() for arg in args])
        parameters = (values, (ctypes.c_longlong,) * len(values))
        # A thread that has not used torch on this device has no context or another device's.
        self._call("cuCtxPushCurrent", self._context)
        try:
            if kernel not in self._functions:
                self._functions[kernel] = self._call("cuModuleGetFunction", self._module, kernel.encode())
            function = self._functions[kernel]
            self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, 0)
        finally:
            self._call("cuCtxPopCurrent")

    def _call(self, name: str, *args: Any) -> Any:
        return _checked(self._driver, getattr(self._driver, name)(*args), name)


def exchange_capture_mode(mode: int) -> int:
    """Set this thread's `CUstreamCaptureMode`, which limits its calls during captures, and return the old one.

    Raises:
        RuntimeError: The driver refuses.
    """
    driver = _import("driver")
    answer = driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode(mode))
    return int(_checked(driver, answer, "cuThreadExchangeStreamCaptureMode"))


def _import(name: str) -> Any:
    try:
        bindings = __import__("cuda.bindings", fromlist=[name])
        return getattr(bindings, name)
    except ImportError as exc:
        raise KernelsUnavailableError(f"{exc}: {install_command('cuda')}") from exc


def _checked(library: Any, answer: tuple[Any, ...], name: str = "NVRTC") -> Any:
    # A call of cuda-bindings returns its error and then its results.
    error, *values = answer
    if int(error):
        raise RuntimeError(f"{name}: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)
