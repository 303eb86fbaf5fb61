"""CUDA C++ kernels, compiled at run time: NVRTC makes a binary for the GPU that is there, the driver loads it.

A pip install needs no compiler for this, only the packages of the extra `cuda`. They are imported when a kernel is
first needed; where that fails, `KernelsUnavailableError` says why, and the operations go on with torch's own.
"""

from __future__ import annotations

import ctypes
import logging
from importlib import resources
from typing import Any, Protocol

import torch

from headrace.kernels.binary_cache import BinaryCache, binary_key

__all__ = [
    "FAMILIES",
    "CudaModule",
    "KernelsUnavailableError",
    "Launcher",
    "compile_family",
    "exchange_capture_mode",
    "num_blocks",
]

FAMILIES = ("bitmap", "bucketize", "dirty_cut", "quantize", "row_digests", "row_packing")
"""The files under `kernels/cuda`, without their ending."""

_logger = logging.getLogger(__name__)

# No contraction to fused multiply-adds: quantized rows are the same bytes as on a CPU.
_OPTIONS = ("--std=c++17", "--fmad=false")
_MAX_BLOCKS = 2**16

_Argument = torch.Tensor | int


class KernelsUnavailableError(RuntimeError):
    """Kernels cannot be compiled or loaded on this machine; the message says why and what would mend it."""


class Launcher(Protocol):
    """Launches the kernels of one family."""

    def launch(self, kernel: str, blocks: int, threads: int, *args: _Argument) -> None:
        """Start a kernel; it runs in the order of the current stream, and nobody waits for it.

        Args:
            kernel: Its name, which ends in `_kernel`.
            blocks: Blocks of the grid; with 0 nothing is started.
            threads: Threads of a block.
            *args: The kernel's parameters: addresses of tensors, which are on the kernel's device, and integers from
                -2⁶³ to 2⁶⁴ - 1.
        """
        ...


def num_blocks(num_items: int, items_per_block: int) -> int:
    """Return the blocks of a grid whose threads go on to further items where there are more than 2¹⁶ blocks' worth."""
    return min(_MAX_BLOCKS, -(-num_items // items_per_block))


def source_of(family: str) -> tuple[bytes, dict[str, bytes]]:
    """Return (source of a family, all headers by name, in the names' order)."""
    folder = resources.files("headrace.kernels.cuda")
    headers = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.endswith(".cuh")}
    return folder.joinpath(f"{family}.cu").read_bytes(), dict(sorted(headers.items()))


def compile_family(family: str, architecture: str, cache: BinaryCache) -> bytes:
    """Return the binary of a family; needs no GPU.

    For an architecture that the compiler does not know it is PTX, which the driver compiles: of the newest one below
    that it knows, as PTX holds for all later ones. The log says so.

    Args:
        family: One of `FAMILIES`.
        architecture: Of the GPU, such as `sm_90`.
        cache: Where it is kept.

    Raises:
        KernelsUnavailableError: The compiler is not installed, or does not know the architecture.
    """
    nvrtc = _import("nvrtc")
    try:
        version = _checked(nvrtc, nvrtc.nvrtcVersion())
        known = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    except RuntimeError as exc:  # cuda-bindings is there, the library is not
        raise KernelsUnavailableError(f"NVRTC cannot be loaded ({exc}): pip install 'headrace[cuda]'") from exc
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
            # One more than is written: Python has only one object for each string of a single byte.
            log = b" " * (_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)) + 1)
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            said = log.partition(b"\0")[0].decode().strip()
            raise KernelsUnavailableError(f"{family}.cu does not compile with {options[-1].decode()}: {said}")
        binary: bytes = b" " * _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
        _checked(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, binary))
        return binary
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class CudaModule:
    """The kernels of one family on one GPU. Makes a `Launcher`.

    Thread: any; kernels go to the calling thread's current stream.
    """

    def __init__(self, family: str, device: torch.device, cache: BinaryCache) -> None:
        """Compile and load.

        Args:
            family: One of `FAMILIES`.
            device: A CUDA device with its index.
            cache: Of compiled kernels.

        Raises:
            KernelsUnavailableError: They cannot be compiled or loaded.
        """
        self._driver = _import("driver")
        self._device = device
        major, minor = torch.cuda.get_device_capability(device)
        binary = compile_family(family, f"sm_{major}{minor}", cache)
        try:
            # torch's context, the device's primary one: kept as long as the process runs, as torch does.
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
        # As signed numbers of 64 bits, whose bits are those of an address or an unsigned one as well.
        values = tuple([_bits(arg) if isinstance(arg, int) else arg.data_ptr() for arg in args])
        parameters = (values, (ctypes.c_longlong,) * len(values))
        # A thread that has not used torch on this device has no context, or another device's.
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
    """Set what this thread may call during captures, a `CUstreamCaptureMode`, and return what it was.

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
        raise KernelsUnavailableError(f"{exc}: pip install 'headrace[cuda]'") from exc


def _checked(library: Any, answer: tuple[Any, ...], name: str = "NVRTC") -> Any:
    """Return what a call of cuda-bindings returns besides its error.

    Raises:
        RuntimeError: The call has failed.
    """
    error, *values = answer
    if int(error):
        raise RuntimeError(f"{name}: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _bits(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
