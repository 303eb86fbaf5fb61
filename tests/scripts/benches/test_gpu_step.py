"""What streaming costs a training step on a GPU. Here a small model is trained on a fake device, by a clock of ours."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches import gpu_step
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.delivery import pipeline
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.stats import StreamerStats


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a small model, few steps, and the server's files in a folder of the test."""
    sizes = {"_NUM_TABLES": 3, "_NUM_ROWS": 500, "_DIM": 8, "_BATCH": 16, "_BOTTOM": (8,), "_TOP": (8,)}
    sizes |= {"_NUM_STEPS": 4, "_NUM_WARM_UPS": 2, "_NUM_PROFILED": 5}
    for name, size in sizes.items():
        monkeypatch.setattr(gpu_step, name, size)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice(trains_at_once=True)
    monkeypatch.setattr(pipeline, "Flusher", functools.partial(Flusher, runtime_of=lambda device: fake))
    return fake


@pytest.mark.usefixtures("small", "fake_device")
def test_the_harder_precision_is_the_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each precision is measured in turns of both, the greater ratio counts, and nothing stays on disk or in torch."""
    now_s = 0.0
    streamers: list[RawEmbeddingStreamer] = []
    pipelines: list[bool] = []

    class Streamer(RawEmbeddingStreamer):
        def __init__(self, *args: str, **settings: Any) -> None:
            super().__init__(*args, **settings)
            streamers.append(self)
            pipelines.append(settings["device_pipeline"])

        def stats(self) -> StreamerStats:
            if not self._is_closed:
                self.flush()  # so few steps may be over before the first ack, which counts bytes
            return super().stats()

    def synchronize(device: torch.device) -> None:
        """Be the clock: seconds for a turn, by the precision and whether it is streamed."""
        nonlocal now_s
        is_streamed = bool(streamers) and not streamers[-1]._is_closed
        seconds = {"highest": (20.0, 21.0), "high": (4.0, 5.0)}[torch.get_float32_matmul_precision()][is_streamed]
        now_s += seconds if not pipelines or pipelines[-1] or not is_streamed else 8.0

    monkeypatch.setattr(gpu_step, "RawEmbeddingStreamer", Streamer)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(gpu_step, "time", SimpleNamespace(perf_counter=lambda: now_s))
    before = torch.get_float32_matmul_precision()
    figures = dict(zip(gpu_step.STEP_FIGURES, gpu_step.measure_step(torch.device("cpu"), 1), strict=True))
    num_bytes = figures.pop("step_bytes_sent")
    assert num_bytes > 0 and num_bytes % (8 + 8 * 4) == 0
    assert figures == {
        "step_time_ratio_gpu": 1.25,
        "step_time_ratio_gpu_highest": 1.05,
        "step_time_ratio_gpu_high": 1.25,
        "step_ms_gpu_highest": 5000.0,
        "step_ms_gpu_high": 1000.0,
        "step_time_ratio_gpu_by_host": 2.0,
    }
    assert pipelines == [True, True, False]
    assert [streamer.stats().step for streamer in streamers] == [6, 6, 6]
    assert torch.get_float32_matmul_precision() == before
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.usefixtures("small")
def test_the_hosts_way_is_not_measured_in_the_pipelines_place() -> None:
    """If the device cannot take over the tables there are no figures."""
    with pytest.raises(UnavailableError, match=r"the host would gather tables\.0\.weight, .*: the log says why"):
        gpu_step.measure_step(torch.device("cpu"), 1)


@pytest.mark.usefixtures("small", "fake_device")
def test_a_profile_without_a_gpu_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile in which nothing of CUDA is seen gives no zero; it does have the steps, and our hooks in them."""
    with pytest.raises(UnavailableError, match=r"it has 5 steps, [1-9][0-9]* of our hooks, 0 calls of CUDA, 0 of our"):
        gpu_step.profile_step(torch.device("cpu"))


def _event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}


_TRACE = [
    {"ph": "M", "name": "process_name"},
    _event("user_annotation", "headrace bench step", 100, 50),
    _event("user_annotation", "headrace", 110, 10),
    _event("cuda_driver", "cuLaunchKernel", 112, 1),
    _event("cuda_runtime", "cudaMemcpyAsync", 114, 1),
    _event("cuda_driver", "cuMemcpyDtoHAsync_v2", 114, 1),
    _event("cuda_runtime", "cudaHostGetDevicePointer", 114, 1),
    _event("cuda_runtime", "cudaFreeAsync", 114, 1),
    _event("cuda_runtime", "cudaStreamWaitEvent", 114, 1),
    _event("cuda_runtime", "cudaStreamSynchronize", 125, 1),  # the model's own
    _event("cuda_runtime", "cudaEventSynchronize", 113, 5, tid=2),  # the sender's
    _event("cuda_runtime", "cudaDeviceSynchronize", 160, 5),  # behind the steps
    _event("kernel", "plan_drain_kernel", 130, 1500.0),
    _event("kernel", "mark_dirty_tables_kernel", 130, 500.0),
    _event("kernel", "void at::native::index_kernel", 130, 900.0),
]


def test_what_counts_as_a_wait() -> None:
    """A step without waits of ours has none, whatever the model and the sender wait for; our kernels are summed up."""
    assert gpu_step._count(_TRACE) == (0, 0, 2.0)


@pytest.mark.parametrize(
    "name",
    ["cudaStreamSynchronize", "cuEventSynchronize", "cudaMemcpy", "cuMemcpyDtoH_v2", "cudaFree", "cudaHostAlloc"],
)
def test_a_wait_of_ours_is_counted(name: str) -> None:
    """Within our hooks, on their thread, each call that waits or may wait counts."""
    assert gpu_step._count([*_TRACE, _event("cuda_runtime", name, 115, 1)])[:2] == (1, 0)


def test_a_wait_for_the_whole_device_is_counted_on_any_thread() -> None:
    """Within a step, whoever makes it."""
    assert gpu_step._count([*_TRACE, _event("cuda_runtime", "cudaDeviceSynchronize", 140, 1, tid=2)])[:2] == (0, 1)


def test_a_profile_without_calls_in_our_hooks_is_no_proof() -> None:
    """Where the profile puts calls of CUDA on other threads, zero would mean nothing."""
    elsewhere = [event | {"tid": 7} if event.get("cat", "").startswith("cuda") else event for event in _TRACE]
    with pytest.raises(UnavailableError, match="our hooks call nothing of CUDA"):
        gpu_step._count(elsewhere)


def test_a_profile_without_a_drain_is_no_proof() -> None:
    """Steps that only mark rows, because no buffer was free, do not show that a drain waits for nothing."""
    marks_only = [event for event in _TRACE if event["name"] != "plan_drain_kernel"]
    with pytest.raises(UnavailableError, match="no step has drained rows"):
        gpu_step._count(marks_only)


@pytest.mark.torchrec
@pytest.mark.usefixtures("small", "fake_device")
def test_fused_tables_are_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's tables are trained with and without streaming, and the pipeline has them."""
    monkeypatch.setattr(gpu_step, "_FUSED_PLACE", ("HOST", "CPU"))
    figures = dict(zip(gpu_step.FUSED_FIGURES, gpu_step.measure_fused_step(torch.device("cpu"), 1), strict=True))
    num_bytes = figures.pop("step_bytes_sent_fused")
    assert num_bytes % (8 + 8 * 4 + 4) == 0
    assert all(figure > 0 for figure in figures.values()), figures
