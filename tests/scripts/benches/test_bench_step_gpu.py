"""What a step's bench turns to: both precisions, with streaming and without. On a fake device here, and not timed."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_device import FakeDevice

from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches import bench_step_gpu
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.delivery import delivery
from headrace.streamer.flush.flusher import Flusher


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a small model, few steps, and the server's files in a folder of the test."""
    sizes = {"_NUM_TABLES": 3, "_NUM_ROWS": 500, "_BATCH": 16, "_HIDDEN": 8, "_NUM_STEPS": 4, "_NUM_WARM_UPS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(bench_step_gpu, name, size)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
def test_the_harder_precision_is_the_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each precision is measured in turns of both, the greater ratio counts, and nothing stays on disk or in torch."""
    fake, now_s = FakeDevice(trains_at_once=True), 0.0
    monkeypatch.setattr(delivery, "Flusher", functools.partial(Flusher, runtime_of=lambda device: fake))
    streamers: list[RawEmbeddingStreamer] = []

    class Streamer(RawEmbeddingStreamer):
        def __init__(self, *args: str, **settings: object) -> None:
            super().__init__(*args, **settings)  # type: ignore[arg-type]
            streamers.append(self)

    def synchronize(device: torch.device) -> None:
        """Be the clock: seconds for a turn, by the precision and whether it is streamed."""
        nonlocal now_s
        is_streamed = bool(streamers) and not streamers[-1]._is_closed
        now_s += {"highest": (20.0, 21.0), "high": (4.0, 5.0)}[torch.get_float32_matmul_precision()][is_streamed]

    monkeypatch.setattr(bench_step_gpu, "RawEmbeddingStreamer", Streamer)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(bench_step_gpu, "time", SimpleNamespace(perf_counter=lambda: now_s))
    before = torch.get_float32_matmul_precision()
    figures = dict(zip(bench_step_gpu.STEP_FIGURES, bench_step_gpu.step_figures(torch.device("cpu"), 1), strict=True))
    assert figures == {
        "step_time_ratio_gpu": 1.25,
        "step_time_ratio_gpu_highest": 1.05,
        "step_time_ratio_gpu_high": 1.25,
        "step_ms_gpu_highest": 5000.0,
        "step_ms_gpu_high": 1000.0,
    }
    assert [streamer.stats().step for streamer in streamers] == [6, 6]
    assert torch.get_float32_matmul_precision() == before
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.slow
def test_the_hosts_way_is_not_measured_in_the_pipelines_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device cannot take the tables over there are no figures."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(UnavailableError, match=r"the host would gather tables\.0\.weight, .*: the log says why"):
        bench_step_gpu.step_figures(torch.device("cpu"), 1)
