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
    sizes |= {"_NUM_STEPS": 4, "_NUM_WARM_UPS": 2}
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
def test_each_precision_has_its_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each precision is measured in turns with and without streaming, and nothing stays on disk or in torch."""
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
    assert figures == {
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


@pytest.mark.torchrec
@pytest.mark.usefixtures("small", "fake_device")
def test_fused_tables_are_drained() -> None:
    """FBGEMM's tables are trained with and without streaming, and the pipeline has them."""
    figures = dict(zip(gpu_step.FUSED_FIGURES, gpu_step.measure_fused_step(torch.device("cpu"), 1), strict=True))
    assert all(figure > 0 for figure in figures.values()), figures
