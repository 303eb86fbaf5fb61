"""A thread waits for a GPU while another one captures, and minds again afterwards."""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.kernels import capture_modes, cuda_module, hip_module

_GLOBAL, _RELAXED = 0, 2


class _Mode(enum.IntEnum):
    GLOBAL = _GLOBAL
    RELAXED = _RELAXED


class _Status(enum.IntEnum):
    SUCCESS = 0
    ERROR_NOT_INITIALIZED = 3


class _FakeDriver:
    """A thread's mode, as the CUDA driver and as HIP's runtime keep it."""

    CUstreamCaptureMode = _Mode

    def __init__(self) -> None:
        self.mode, self.status = _GLOBAL, _Status.SUCCESS
        library = SimpleNamespace(
            hipThreadExchangeStreamCaptureMode=self._exchange_by_address, hipGetErrorName=lambda status: b"hipError"
        )
        self.hip = hip_module._Library(library, "hipGetErrorName")  # type: ignore[arg-type]

    def cuThreadExchangeStreamCaptureMode(self, mode: _Mode) -> tuple[Any, ...]:
        assert isinstance(mode, _Mode)  # the bindings take nothing else
        if self.status:
            return self.status, None
        before, self.mode = self.mode, int(mode)
        return _Status.SUCCESS, _Mode(before)

    def _exchange_by_address(self, address: Any) -> int:
        value = ctypes.cast(address, ctypes.POINTER(ctypes.c_int))
        if not self.status:
            self.mode, value[0] = value[0], self.mode
        return int(self.status)


@pytest.fixture(params=["CUDA", "HIP"])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _FakeDriver:
    """Each is there alone, as with a torch of its own kind."""
    fake, is_hip = _FakeDriver(), request.param == "HIP"

    def absent(*_: Any) -> Any:
        raise AssertionError(f"torch is one for {request.param}")

    monkeypatch.setattr(torch.version, "hip", "6.4" if is_hip else None)
    monkeypatch.setattr(cuda_module, "_import", absent if is_hip else lambda name: fake)
    monkeypatch.setattr(hip_module, "_runtime", (lambda: fake.hip) if is_hip else absent)
    return fake


def test_a_thread_minds_no_capture_while_it_waits(driver: _FakeDriver) -> None:
    """Inside the block captures of other threads forbid nothing; after it they do as before, also after an error."""
    with capture_modes.beside_captures():
        assert driver.mode == _RELAXED
        with capture_modes.beside_captures():
            pass
        assert driver.mode == _RELAXED
    assert driver.mode == _GLOBAL
    with pytest.raises(ValueError, match="in the block"), capture_modes.beside_captures():
        raise ValueError("in the block")
    assert driver.mode == _GLOBAL


def test_a_refusal_is_an_error(driver: _FakeDriver) -> None:
    """What the driver refuses is raised with the name of the call."""
    driver.status = _Status.ERROR_NOT_INITIALIZED
    with pytest.raises(RuntimeError, match="ThreadExchangeStreamCaptureMode"), capture_modes.beside_captures():
        pass
