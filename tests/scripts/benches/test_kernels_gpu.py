"""A part that fails on a GPU does not cost the others' figures. Here parts run on the CPU, and are not timed."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import FakeDevice

from headrace.cli import main
from headrace.kernels.runtime.cuda_module import KernelsUnavailableError
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches import kernels, kernels_gpu
from headrace.scripts.benches.kernels_gpu import STEP_FIGURES
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.delivery import pipeline
from headrace.streamer.flush.flusher import Flusher

# Without CUDA there is no pinned memory to pack to.
_UNPINNED = {"pack_and_d2h_share_of_d2h", "pack_to_pinned_share_of_d2h"}


def fails(error: BaseException) -> Callable[..., Any]:
    def stop(*args: Any) -> None:
        raise error

    return stop


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Small inputs, and a step bench whose server cannot be started."""
    sizes = {"_NUM_ROWS": 10_000, "_NUM_MARKED": 100, "_FLUSHED_BYTES": 64, "_TABLE_ROWS": 2600, "_NUM_IDS": 260}
    sizes["_NUM_BUCKETIZED"] = 300
    for name, size in sizes.items():
        monkeypatch.setattr(kernels_gpu, name, size)

    def seconds(run: Callable[[], object], num_rounds: int, *, before: Callable[[], object] = lambda: None) -> float:
        before()
        run()
        return 1.0

    monkeypatch.setattr(kernels_gpu, "gpu_module", lambda family, device: None)
    monkeypatch.setattr(kernels_gpu, "_seconds", seconds)
    monkeypatch.setattr(kernels_gpu, "_floors", lambda *args: (1e9, 1e9))
    monkeypatch.setattr(kernels_gpu, "measure_step", fails(UnavailableError("the server did not start\nfor a reason")))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")
    return torch.device("cpu")


def test_a_part_that_fails_costs_its_own_figures(
    small: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each figure is a number, or null with the failure of its part in one line."""
    message = "CUDA error: an illegal memory access was encountered"
    monkeypatch.setattr(kernels_gpu, "row_digests", fails(RuntimeError(message)))
    measured = kernels_gpu.measure_gpu(small, 1)
    failures = {name: text for name, text in measured.failures.items() if name not in _UNPINNED}
    assert failures == {
        "row_digests_share": f"RuntimeError: {message}",
        **dict.fromkeys(STEP_FIGURES, "UnavailableError: the server did not start"),
    }
    missing = {name for name, figure in measured.figures.items() if figure is None}
    assert missing - _UNPINNED == {"row_digests_share", *STEP_FIGURES}
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "in stop" in shown


def test_torchs_operations_are_not_measured_in_the_kernels_place(
    small: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a family cannot be compiled there are no shares but a reason; the bandwidths are there."""
    monkeypatch.setattr(kernels_gpu, "gpu_module", fails(KernelsUnavailableError("bitmap.cu does not compile")))
    measured = kernels_gpu.measure_gpu(small, 1)
    there = {name for name, figure in measured.figures.items() if figure is not None}
    assert there == {"device", "device_copy_bytes_per_s", "pinned_d2h_bytes_per_s"}
    assert measured.failures["take_dirty_share"] == "KernelsUnavailableError: bitmap.cu does not compile"


def test_shares_are_of_the_fewest_bytes(small: torch.device) -> None:
    """Each input is read once and each output written once, here at a gigabyte a second."""
    figures = kernels_gpu.measure_gpu(small, 1).figures
    num_bytes = {name: round(figures[name] * 1e9) for name in figures if name.endswith("_share")}
    row_bytes, id_bytes = 260 * 512, 260 * 8
    assert num_bytes["pack_rows_share"] == 2 * (row_bytes + id_bytes)
    assert num_bytes["unpack_rows_share"] == 2 * row_bytes + id_bytes
    assert num_bytes["row_digests_share"] == row_bytes + 2 * id_bytes
    assert num_bytes["bucketize_share"] == 5 * 300 * 8
    assert num_bytes["quantize_int8_share"] == num_bytes["dequantize_int8_share"] > row_bytes + 260 * 128
    assert num_bytes["cut_dirty_share"] > 2 * 26 * 5 * 512  # what was marked before: some ten rows of each table


def test_what_there_is_is_kept_after_each_part(small: torch.device) -> None:
    """A part that never ends costs no figure that was measured before it."""
    kept: list[dict[str, Any]] = []
    kernels_gpu.measure_gpu(small, 1, lambda measured: kept.append(copy.copy(measured.figures)))
    numbers = [sum(figure is not None for figure in figures.values()) for figures in kept]
    assert len(kept) == 9 and numbers[0] == 3 and numbers == sorted(numbers) and numbers[-1] >= 13


def test_the_bench_fails_and_keeps_its_figures(
    small: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a GPU and a part that fails, the JSON has the other figures and the failure, and the exit code is not 0."""
    measure = kernels_gpu.measure_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "measure_gpu", lambda device, *args: measure(small, *args))
    monkeypatch.setattr(kernels, "measure_cpu", lambda config, on_stage: {"ratios": {}})
    file = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--json", str(file)]) == 1
    said = json.loads(file.read_text())
    assert said["gpu"]["cut_dirty_share"] > 0 and said["gpu"]["step_time_ratio_gpu"] is None
    assert "UnavailableError" in said["gpu_failures"]["step_time_ratio_gpu"]
    assert "was not measured" in capsys.readouterr().err


@pytest.fixture
def small_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a small model, few steps, and the server's files in a folder of the test."""
    sizes = {"_NUM_TABLES": 3, "_STEP_ROWS": 500, "_BATCH": 16, "_HIDDEN": 8, "_NUM_STEPS": 4, "_NUM_WARM_UPS": 2}
    for name, size in sizes.items():
        monkeypatch.setattr(kernels_gpu, name, size)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("small_step")
def test_the_harder_precision_is_the_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each precision is measured in turns of both, the greater ratio counts, and nothing stays on disk or in torch."""
    fake, now_s = FakeDevice(trains_at_once=True), 0.0
    monkeypatch.setattr(pipeline, "Flusher", functools.partial(Flusher, runtime_of=lambda device: fake))
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

    monkeypatch.setattr(kernels_gpu, "RawEmbeddingStreamer", Streamer)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(kernels_gpu, "time", SimpleNamespace(perf_counter=lambda: now_s))
    before = torch.get_float32_matmul_precision()
    figures = dict(zip(kernels_gpu.STEP_FIGURES, kernels_gpu.measure_step(torch.device("cpu"), 1), strict=True))
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
@pytest.mark.usefixtures("small_step")
def test_the_hosts_way_is_not_measured_in_the_pipelines_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device cannot take over the tables there are no figures."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with pytest.raises(UnavailableError, match=r"the host would gather tables\.0\.weight, .*: the log says why"):
        kernels_gpu.measure_step(torch.device("cpu"), 1)
