"""CUDA sources compile for the GPUs that are promised; loading and launching, against a driver that keeps the rules."""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.kernels.runtime import cuda_module as cm
from headrace.kernels.runtime.cuda_module import BinaryCache, binary_key
from headrace.schemas.extras import install_command

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
    with pytest.raises(cm.KernelsUnavailableError, match=re.escape(install_command("cuda"))):
        cm.compile_family("bitmap", "sm_90", BinaryCache(tmp_path))


class _Result(enum.IntEnum):
    SUCCESS = 0
    NOT_FOUND = 500


class _FakeDriver:
    """What of cuda-bindings a launch calls. It checks that the device's context is current."""

    CUstreamCaptureMode = enum.IntEnum("CUstreamCaptureMode", {"GLOBAL": 0, "RELAXED": 2})

    def __init__(self) -> None:
        self.contexts: list[str] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        known: dict[str, Any] = {
            "nvrtcVersion": lambda: (12, 0),
            "nvrtcGetSupportedArchs": lambda: [90],
            "cuDeviceGet": lambda ordinal: f"device {ordinal}",
            "cuDevicePrimaryCtxRetain": lambda device: f"context of {device}",
            "cuCtxPushCurrent": self.contexts.append,
            "cuCtxPopCurrent": self.contexts.pop,
            "cuModuleLoadData": lambda binary: binary,
            "cuModuleGetFunction": lambda module, name: name,
            "cuLaunchKernel": lambda *args: self.launches.append((self.contexts[-1], *args)),
            "cuThreadExchangeStreamCaptureMode": lambda mode: self.CUstreamCaptureMode(2 - mode),
        }

        def call(*args: Any) -> tuple[Any, ...]:
            if name == "cuModuleGetFunction" and args[1] not in args[0]:
                return (_Result.NOT_FOUND,)
            result = known[name](*args)
            return (_Result.SUCCESS, *(result if isinstance(result, tuple) else (result,)))

        return call


def test_a_launch_passes_eight_bytes_an_argument(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Addresses and integers go to the current stream as 64 bits each, in the device's context; refusals are errors."""
    driver = _FakeDriver()
    bindings = {"cuda": ModuleType("cuda"), "cuda.bindings": SimpleNamespace(driver=driver, nvrtc=driver)}
    for name, module in bindings.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(BinaryCache, "get", lambda cache, name, make: b"mark_dirty_int64_kernel")
    module, tensor = cm.CudaModule("bitmap", torch.device("cuda", 1), BinaryCache(tmp_path)), torch.zeros(3)
    module.launch("mark_dirty_int64_kernel", 0, 256)  # a grid without blocks, which the driver refuses
    module.launch("mark_dirty_int64_kernel", 5, 256, tensor, 2**64 - 1, -2)
    parameters = ((tensor.data_ptr(), -1, -2), (ctypes.c_longlong,) * 3)
    grid = (5, 1, 1, 256, 1, 1)
    assert driver.launches == [("context of device 1", b"mark_dirty_int64_kernel", *grid, 0, 77, parameters, 0)]
    with pytest.raises(RuntimeError, match="cuModuleGetFunction: NOT_FOUND"):
        module.launch("other_kernel", 1, 32)
    assert not driver.contexts
    assert cm.exchange_capture_mode(2) == 0


def _refuse() -> bytes:
    raise AssertionError("made though it is there")


def test_a_binary_is_made_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second cache of the folder, as of a later process, finds what the first has made; the default is the user's.

    Where nothing can be kept a binary is made each time, and the log says why. Every part of a key counts."""
    assert BinaryCache(tmp_path / "a" / "b").get("key.cubin", lambda: b"binary") == b"binary"
    assert BinaryCache(tmp_path / "a" / "b").get("key.cubin", _refuse) == b"binary"
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["key.cubin"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert BinaryCache(tmp_path / "file" / "x").get("key.cubin", lambda: b"binary") == b"binary"
    assert "cannot be kept" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    BinaryCache().get("key.cubin", lambda: b"binary")
    assert (tmp_path / "headrace" / "kernels" / "key.cubin").exists()
    keys = {binary_key(parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"ab", b"d"], [b"ab", b"c", b""])}
    assert len(keys) == 5


@pytest.mark.parametrize("keep", [0, 10, 32, 35, None])
def test_a_damaged_file_is_made_again(tmp_path: Path, keep: int | None) -> None:
    """A file that is truncated, or has a flipped bit, never reaches a GPU."""
    BinaryCache(tmp_path).get("key.cubin", lambda: b"binary")
    content = (tmp_path / "key.cubin").read_bytes()
    (tmp_path / "key.cubin").write_bytes(content[:keep] if keep is not None else content[:-1] + b"Y")
    assert BinaryCache(tmp_path).get("key.cubin", lambda: b"again") == b"again"
    assert BinaryCache(tmp_path).get("key.cubin", _refuse) == b"again"
