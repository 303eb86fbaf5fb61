"""CUDA sources compile for the GPUs that are promised; loading and launching, against a driver that keeps the rules."""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.kernels import cuda_module as cm
from headrace.kernels.binary_cache import BinaryCache

ARCHITECTURES = ("sm_80", "sm_90")
_FOLDER = Path(cm.__file__).resolve().parent / "cuda"
_needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None,
    reason="the extra cuda is not installed",
)


def test_every_source_is_a_family() -> None:
    """Each file is named, and each kernel's name ends in `_kernel`."""
    assert {path.stem for path in _FOLDER.glob("*.cu")} == set(cm.FAMILIES)
    for family in cm.FAMILIES:
        names = re.findall(r"HEADRACE_KERNEL (\w+)\(", cm.source_of(family)[0].decode())
        assert names and all(name.endswith("_kernel") for name in names)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("family", cm.FAMILIES)
def test_nvcc_compiles(family: str, architecture: str, tmp_path: Path) -> None:
    """nvcc takes each source without a warning, and no kernel spills a register."""
    command = ["nvcc", f"-arch={architecture}", "-std=c++17", "-fmad=false", "-cubin", "-Xptxas", "-v"]
    command += ["--Werror", "all-warnings", "-o", tmp_path / "a.cubin", _FOLDER / f"{family}.cu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spills and set(spills) == {("0", "0")}, done.stderr


@_needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("family", cm.FAMILIES)
def test_nvrtc_compiles(family: str, architecture: str, tmp_path: Path) -> None:
    """The run-time compiler makes a binary with every kernel of the source in it, and keeps it."""
    binary = cm.compile_family(family, architecture, BinaryCache(tmp_path))
    assert binary.startswith(b"\x7fELF")
    for name in re.findall(r"HEADRACE_KERNEL (\w+)\(", cm.source_of(family)[0].decode()):
        assert f".text.{name}".encode() in binary
    (kept,) = tmp_path.iterdir()
    assert kept.read_bytes().endswith(binary)


@_needs_nvrtc
@pytest.mark.parametrize("family", cm.FAMILIES)
def test_a_newer_architecture_gets_ptx(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the compiler does not know yet is PTX of its newest, whole, without contraction, and the log says so."""
    with caplog.at_level(logging.INFO):
        binary = cm.compile_family(family, "sm_999", BinaryCache(tmp_path))
    text = binary.removesuffix(b"\0").decode()
    assert binary.endswith(b"\0") and "\0" not in text  # the driver looks for the end
    (newest,) = re.findall(r"\.target sm_(\d+)", text)
    for name in re.findall(r"HEADRACE_KERNEL (\w+)\(", cm.source_of(family)[0].decode()):
        assert f".entry {name}(" in text
    # Whoever compiles it may contract what has no rounding.
    assert not re.search(r"\b(mul|add|sub)(\.ftz)?\.f32", text)
    said = rf"NVRTC \d+\.\d+ does not know sm_999: {family}\.cu as PTX of compute_{newest}"
    assert any(re.fullmatch(said, message) for message in caplog.messages)
    (kept,) = tmp_path.iterdir()
    assert kept.suffix == ".ptx"


@_needs_nvrtc
def test_a_changed_header_is_compiled_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A binary is kept for the headers that it was made with, each of them."""
    cm.compile_family("bucketize", "sm_90", BinaryCache(tmp_path))
    source, headers = cm.source_of("bucketize")
    assert {"common.cuh", "shards.cuh"} <= set(headers)
    for number, name in enumerate(headers):
        changed = {**headers, name: headers[name] + b"// changed"}
        monkeypatch.setattr(cm, "source_of", lambda family, changed=changed: (source, changed))
        cm.compile_family("bucketize", "sm_90", BinaryCache(tmp_path))
        assert len(list(tmp_path.iterdir())) == number + 2


@_needs_nvrtc
def test_what_does_not_compile_says_so(tmp_path: Path) -> None:
    """An architecture that the compiler does not know is an error with the compiler's words."""
    with pytest.raises(cm.KernelsUnavailableError, match=r"bitmap\.cu.*sm_1"):
        cm.compile_family("bitmap", "sm_1", BinaryCache(tmp_path))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the extra, the error names the command that installs it."""
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    with pytest.raises(cm.KernelsUnavailableError, match=re.escape("pip install 'headrace[cuda]'")):
        cm.compile_family("bitmap", "sm_90", BinaryCache(tmp_path))


class _Result(enum.IntEnum):
    SUCCESS = 0
    ERROR_INVALID_IMAGE = 200
    ERROR_NOT_FOUND = 500


class _FakeDriver:
    """A CUDA driver that has one module and checks that a context is current where one is needed."""

    def __init__(self) -> None:
        self.contexts: list[str] = []
        self.launches: list[tuple[Any, ...]] = []
        self.is_image_valid = True

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return _Result.SUCCESS, f"device {ordinal}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[Any, ...]:
        return _Result.SUCCESS, f"context of {device}"

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (_Result.SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return _Result.SUCCESS, self.contexts.pop()

    def cuModuleLoadData(self, binary: bytes) -> tuple[Any, ...]:
        assert self.contexts
        return (_Result.SUCCESS, binary) if self.is_image_valid else (_Result.ERROR_INVALID_IMAGE, None)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        return (_Result.SUCCESS, name) if name in module else (_Result.ERROR_NOT_FOUND, None)

    def cuLaunchKernel(self, function: bytes, *args: Any) -> tuple[Any, ...]:
        assert self.contexts == ["context of device 1"]
        self.launches.append((function, *args))
        return (_Result.SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _FakeDriver:
    fake = _FakeDriver()
    monkeypatch.setattr(cm, "_import", lambda name: fake)
    monkeypatch.setattr(cm, "compile_family", lambda family, architecture, cache: b"mark_dirty_int64_kernel")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    stream = type("Stream", (), {"cuda_stream": 77})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return fake


def _module(tmp_path: Path) -> cm.CudaModule:
    return cm.CudaModule("bitmap", torch.device("cuda", 1), BinaryCache(tmp_path))


def test_a_launch_passes_eight_bytes_an_argument(driver: _FakeDriver, tmp_path: Path) -> None:
    """Addresses and integers, signed or not, go to the current stream as 64 bits each, in the device's context."""
    tensor = torch.zeros(3)
    _module(tmp_path).launch("mark_dirty_int64_kernel", 5, 256, tensor, 2**64 - 1, -2)
    ((function, *grid, shared_bytes, stream, parameters, extra),) = driver.launches
    assert (function, grid, shared_bytes, stream, extra) == (
        b"mark_dirty_int64_kernel",
        [5, 1, 1, 256, 1, 1],
        0,
        77,
        0,
    )
    assert parameters == ((tensor.data_ptr(), -1, -2), (ctypes.c_longlong,) * 3)
    assert not driver.contexts


def test_nothing_to_do_is_no_launch(driver: _FakeDriver, tmp_path: Path) -> None:
    """A grid without blocks, which the driver refuses, is not started."""
    _module(tmp_path).launch("mark_dirty_int64_kernel", 0, 256)
    assert not driver.launches


def test_a_refusal_is_an_error(driver: _FakeDriver, tmp_path: Path) -> None:
    """What the driver refuses is raised with its name, and the caller's context is the one from before."""
    with pytest.raises(RuntimeError, match=r"cuModuleGetFunction: ERROR_NOT_FOUND"):
        _module(tmp_path).launch("other_kernel", 1, 32)
    assert not driver.contexts
    driver.is_image_valid = False
    with pytest.raises(cm.KernelsUnavailableError, match=r"bitmap\.cu cannot be loaded.*INVALID_IMAGE"):
        _module(tmp_path)
    assert not driver.contexts
