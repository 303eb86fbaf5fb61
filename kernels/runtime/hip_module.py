"""The same kernels on AMD GPUs: hiprtc compiles them at run time for the GPU at hand, and HIP's runtime loads them.

Both libraries come with a torch built for ROCm and are found as torch finds them, because its streams mean nothing to a
second runtime in the process. So a dozen calls go through ctypes; AMD's `hip-python` is for one version of ROCm and
looks for an installation of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import _utils as torch_libraries

from headrace.kernels.runtime.cuda_module import BinaryCache, KernelsUnavailableError, binary_key, source_of

__all__ = ["HipModule", "compile_family", "exchange_capture_mode"]

# As for NVRTC: no contraction. hiprtc rounds divisions correctly by default.
_OPTIONS = ("-std=c++17", "-ffp-contract=off")


class _Library:
    # Its calls return a status, of which 0 is success.

    def __init__(self, library: ctypes.CDLL, name_of_status: str) -> None:
        self._library = library
        self._name_of_status = getattr(library, name_of_status)
        self._name_of_status.restype = ctypes.c_char_p

    def call(self, name: str, *args: Any) -> None:
        # Arguments need ctypes' types: a plain integer would lose its upper half.
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name}: {self._name_of_status(status).decode()}")


def compile_family(family: str, architecture: str, cache: BinaryCache) -> bytes:
    """Return the binary of a family for an architecture such as `gfx90a` or `gfx90a:sramecc+:xnack-`; needs no GPU.

    Raises:
        KernelsUnavailableError: hiprtc cannot be loaded, or the source does not compile.
    """
    compiler, runtime, version = _compiler(), _runtime(), ctypes.c_int()
    source, headers = source_of(family)
    options = [option.encode() for option in (*_OPTIONS, f"--offload-arch={architecture}")]
    try:
        # hiprtc's own version has been 9.0 for years. The runtime is of the same release, and its version has the
        # build.
        runtime.call("hipRuntimeGetVersion", ctypes.byref(version))
        key = binary_key([source, *headers.values(), *options, str(version.value).encode()])
        return cache.get(f"{key}.hsaco", lambda: _compile(compiler, family, source, headers, options))
    except RuntimeError as exc:
        raise KernelsUnavailableError(f"{family}.cu does not compile with {options[-1].decode()}: {exc}") from exc


def _compile(compiler: _Library, family: str, source: bytes, headers: dict[str, bytes], options: list[bytes]) -> bytes:
    program = ctypes.c_void_p()
    texts, names = _strings(list(headers.values())), _strings([name.encode() for name in headers])
    file_name, num_headers = f"{family}.cu".encode(), ctypes.c_int(len(headers))
    compiler.call("hiprtcCreateProgram", ctypes.byref(program), source, file_name, num_headers, texts, names)
    try:
        compiler.call("hiprtcCompileProgram", program, ctypes.c_int(len(options)), _strings(options))
        return _bytes_of(compiler, program, "Code")
    except RuntimeError as exc:
        output = _bytes_of(compiler, program, "ProgramLog").partition(b"\0")[0].decode().strip()
        raise RuntimeError(f"{exc}: {output}") from exc
    finally:
        compiler.call("hiprtcDestroyProgram", ctypes.byref(program))


def _bytes_of(compiler: _Library, program: ctypes.c_void_p, what: str) -> bytes:
    size_bytes = ctypes.c_size_t()
    compiler.call(f"hiprtcGet{what}Size", program, ctypes.byref(size_bytes))
    content = ctypes.create_string_buffer(size_bytes.value)
    compiler.call(f"hiprtcGet{what}", program, content)
    return content.raw


class HipModule:
    """The kernels of one family on one AMD GPU; a `Launcher`.

    Thread: any; kernels run on the calling thread's current stream.
    """

    def __init__(self, family: str, device: torch.device, cache: BinaryCache) -> None:
        """Compile and load a family for a device with its index; a torch for ROCm calls it `cuda`.

        Raises:
            KernelsUnavailableError: They cannot be compiled or loaded.
        """
        self._runtime = _runtime()
        self._device = device
        # Kept as long as the module, because HIP may read from it after loading.
        self._binary = compile_family(family, torch.cuda.get_device_properties(device).gcnArchName, cache)
        self._module = ctypes.c_void_p()
        try:
            with torch.cuda.device(device):
                self._runtime.call("hipModuleLoadData", ctypes.byref(self._module), self._binary)
        except RuntimeError as exc:
            raise KernelsUnavailableError(f"{family}.cu cannot be loaded: {exc}") from exc
        self._functions: dict[str, ctypes.c_void_p] = {}

    def launch(self, kernel: str, blocks: int, threads: int, *args: torch.Tensor | int) -> None:
        """See `Launcher.launch`.

        Raises:
            RuntimeError: HIP refuses, or a kernel before this one has failed.
        """
        if not blocks:
            return
        if kernel not in self._functions:
            function = ctypes.c_void_p()
            self._runtime.call("hipModuleGetFunction", ctypes.byref(function), self._module, kernel.encode())
            self._functions[kernel] = function
        bits = [(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg) % 2**64 for arg in args]
        values = (ctypes.c_uint64 * len(bits))(*bits)
        first, width = ctypes.addressof(values), ctypes.sizeof(ctypes.c_uint64)
        addresses = (ctypes.c_void_p * len(bits))(*(first + width * number for number in range(len(bits))))
        # Three dimensions of the grid, three of the block, and the bytes of shared memory.
        numbers = [ctypes.c_uint(number) for number in (blocks, 1, 1, threads, 1, 1, 0)]
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        # The null stream belongs to the current device.
        with torch.cuda.device(self._device):
            self._runtime.call("hipModuleLaunchKernel", self._functions[kernel], *numbers, stream, addresses, None)


def exchange_capture_mode(mode: int) -> int:
    """Set this thread's `hipStreamCaptureMode`, which limits its calls during captures, and return the old one.

    Raises:
        RuntimeError: HIP refuses.
    """
    value = ctypes.c_int(mode)
    _runtime().call("hipThreadExchangeStreamCaptureMode", ctypes.byref(value))
    return value.value


def _strings(values: list[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)


def _compiler() -> _Library:
    return _loaded(torch_libraries._get_hiprtc_library, "hiprtcGetErrorString")


def _runtime() -> _Library:
    return _loaded(torch_libraries._get_hip_runtime_library, "hipGetErrorName")


def _loaded(load: Callable[[], ctypes.CDLL], name_of_status: str) -> _Library:
    try:
        return _Library(load(), name_of_status)
    except OSError as exc:
        raise KernelsUnavailableError(f"{exc}: torch's ROCm libraries cannot be loaded; install torch again") from exc
