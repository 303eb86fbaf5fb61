"""The sources compile for AMD's GPUs, with 64 lanes and with 32; loading and launching, by a HIP that keeps the rules.

No test here runs a kernel: the same sources run on the host with 64 lanes, in the tests of their families.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.kernels.runtime import dispatch
from headrace.kernels.runtime import hip_module as hm
from headrace.kernels.runtime.cuda_module import FAMILIES, BinaryCache, KernelsUnavailableError, source_of

_FOLDER = Path(hm.__file__).resolve().parent / "cuda"
_GPU = torch.device("cuda", 1)
_RUNTIME = ctypes.util.find_library("amdhip64")
_COMPILER = ctypes.util.find_library("hiprtc") or _RUNTIME  # HIP 5 has both in one library
_needs_hiprtc = pytest.mark.skipif(_RUNTIME is None, reason="hiprtc is not installed")
# Of 64 bits, and with both halves in use.
_STREAM, _MODULE, _FUNCTION = 0x7F00_0000_1000, 0x7F00_0000_2000, 0x7F00_0000_3000


@pytest.fixture
def hiprtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the machine's hiprtc, where torch would have its own."""
    monkeypatch.setattr(hm.torch_libraries, "_get_hiprtc_library", lambda: ctypes.CDLL(_COMPILER))
    monkeypatch.setattr(hm.torch_libraries, "_get_hip_runtime_library", lambda: ctypes.CDLL(_RUNTIME))


@pytest.mark.skipif(shutil.which("hipcc") is None, reason="hipcc is not installed")
@pytest.mark.parametrize(
    ("family", "architecture"), [*((family, "gfx90a") for family in FAMILIES), ("bitmap", "gfx1030")]
)
def test_hipcc_compiles(family: str, architecture: str, tmp_path: Path) -> None:
    """hipcc takes each source without a warning, and its lanes are as many as the GPU's."""
    lanes = "static_assert(WARP_LANES == __AMDGCN_WAVEFRONT_SIZE && sizeof(LaneMask) * 8 == WARP_LANES);\n"
    (tmp_path / "a.hip").write_text(f'#include "{_FOLDER / family}.cu"\n{lanes}')
    command = ["hipcc", f"--offload-arch={architecture}", "--cuda-device-only", "-std=c++17", "-ffp-contract=off"]
    command += ["-include", "hip/hip_runtime.h", "-Wall", "-Wextra", "-Werror"]
    command += ["-c", "-o", tmp_path / "a.o", tmp_path / "a.hip"]
    environment = {**os.environ, "HIP_PLATFORM": "amd"}  # it would be nvcc where there is one
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr


@_needs_hiprtc
@pytest.mark.usefixtures("hiprtc")
@pytest.mark.parametrize("family", FAMILIES)
def test_hiprtc_compiles(family: str, tmp_path: Path) -> None:
    """The run-time compiler makes a binary with every kernel of the source in it, no vector spilled, and keeps it."""
    binary = hm.compile_family(family, "gfx90a:sramecc+:xnack-", BinaryCache(tmp_path))
    assert binary.startswith(b"\x7fELF")
    names = re.findall(r"HEADRACE_KERNEL (\w+)\(", source_of(family)[0].decode())
    for name in names:
        assert f"\0{name}.kd\0".encode() in binary
    # What the binary says of each kernel, as msgpack: a key and a small number.
    for fact in (b".wavefront_size\x40", b".vgpr_spill_count\0"):
        assert binary.count(fact) == len(names), fact
    (kept,) = tmp_path.iterdir()
    assert kept.suffix == ".hsaco" and kept.read_bytes().endswith(binary)


@_needs_hiprtc
@pytest.mark.usefixtures("hiprtc")
def test_what_does_not_compile_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error in the source is raised with the compiler's words."""
    monkeypatch.setattr(hm, "source_of", lambda family: (b"no kernel", {}))
    with pytest.raises(KernelsUnavailableError, match=r"bitmap\.cu.*gfx90a.*COMPILATION.*unknown type name 'no'"):
        hm.compile_family("bitmap", "gfx90a", BinaryCache(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where torch's libraries cannot be loaded, the error says which."""

    def refuse() -> ctypes.CDLL:
        raise OSError("libhiprtc.so: cannot open shared object file")

    monkeypatch.setattr(hm.torch_libraries, "_get_hiprtc_library", refuse)
    with pytest.raises(KernelsUnavailableError, match=r"libhiprtc\.so.*install torch again"):
        hm.compile_family("bitmap", "gfx90a", BinaryCache(tmp_path))


class _FakeHip:
    """HIP's runtime with one module. It is called as a C library is: what is no wider than an int arrives as one."""

    def __init__(self) -> None:
        self.current_device = 0
        self.launches: list[tuple[int, ...]] = []
        self.parameters: list[int] = []
        number, address, text = ctypes.c_uint, ctypes.c_void_p, ctypes.c_char_p
        self._kept: list[object] = []
        self.library = SimpleNamespace(
            hipGetErrorName=self._function(address, self._name, number),
            hipRuntimeGetVersion=self._function(number, lambda version: 3, address),
            hipModuleLoadData=self._function(number, self._load, ctypes.POINTER(address), text),
            hipModuleGetFunction=self._function(number, self._get, ctypes.POINTER(address), address, text),
            hipModuleLaunchKernel=self._function(
                number, self._launch, address, *[number] * 7, address, address, address
            ),
            hipThreadExchangeStreamCaptureMode=self._function(number, self._exchange, ctypes.POINTER(ctypes.c_int)),
        )

    def _function(self, result: type, python: Callable[..., object], *arguments: type) -> object:
        function = ctypes.CFUNCTYPE(result, *arguments)(python)
        self._kept.append(function)
        # By its address, so that ctypes knows as little of it as of a function of a library.
        return ctypes.CDLL(None)._FuncPtr(ctypes.cast(function, ctypes.c_void_p).value)

    def _name(self, status: int) -> int:
        name = ctypes.create_string_buffer(b"hipErrorOf%d" % status)
        self._kept.append(name)
        return ctypes.addressof(name)

    def _load(self, module: object, image: bytes) -> int:
        module[0] = _MODULE  # type: ignore[index]
        return 0 if self.current_device == _GPU.index else 200

    def _get(self, function: object, module: int, name: bytes) -> int:
        function[0] = _FUNCTION  # type: ignore[index]
        return 0 if module == _MODULE and name == b"mark_dirty_int64_kernel" else 500

    def _launch(self, function: int, *rest: int) -> int:
        *grid, stream, parameters, extra = rest
        if function != _FUNCTION or self.current_device != _GPU.index or extra:
            return 1
        self.launches.append((*grid, stream))
        addresses = ctypes.cast(parameters, ctypes.POINTER(ctypes.POINTER(ctypes.c_uint64)))
        self.parameters = [addresses[number][0] for number in range(3)]
        return 0

    def _exchange(self, mode: object) -> int:
        mode[0] = 2 - mode[0]  # type: ignore[index]
        return 0


@pytest.fixture
def hip(monkeypatch: pytest.MonkeyPatch) -> _FakeHip:
    """Have a torch for ROCm with the fake runtime, and a binary that needs no compiler."""
    fake = _FakeHip()

    @contextlib.contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        before, fake.current_device = fake.current_device, device.index
        try:
            yield
        finally:
            fake.current_device = before

    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(hm.torch_libraries, "_get_hip_runtime_library", lambda: fake.library)
    monkeypatch.setattr(hm, "compile_family", lambda family, architecture, cache: architecture.encode())
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=_STREAM))
    return fake


def test_a_launch_passes_eight_bytes_an_argument(hip: _FakeHip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and integers go to the current stream as 64 bits each, on the module's device; refusals are errors."""
    monkeypatch.setattr(dispatch, "_modules", {})
    module, tensor = dispatch.gpu_module("bitmap", _GPU), torch.zeros(3)
    assert isinstance(module, hm.HipModule) and dispatch.gpu_module("bitmap", _GPU) is module
    module.launch("mark_dirty_int64_kernel", 0, 256)  # a grid without blocks, which HIP refuses
    for _ in range(2):  # the function is looked up once
        module.launch("mark_dirty_int64_kernel", 5, 256, tensor, 2**64 - 1, -2)
    assert hip.launches == [(5, 1, 1, 256, 1, 1, 0, _STREAM)] * 2
    assert hip.parameters == [tensor.data_ptr(), 2**64 - 1, 2**64 - 2]
    with pytest.raises(RuntimeError, match=r"hipModuleGetFunction: hipErrorOf500"):
        module.launch("other_kernel", 1, 64)
    assert hip.current_device == 0
    assert hm.exchange_capture_mode(2) == 0
