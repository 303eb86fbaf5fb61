"""A part that fails on a GPU does not cost the others' figures. Here parts run on the CPU, and are not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.cli import main
from headrace.kernels.runtime.cuda_module import KernelsUnavailableError
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches import kernels, kernels_gpu
from headrace.scripts.benches.kernels_gpu import FUSED_FIGURES, STEP_FIGURES

_OF_STEPS = (*STEP_FIGURES, *FUSED_FIGURES)
# Without CUDA there is no pinned memory to pack to.
_UNPINNED = {"pack_to_pinned_share_of_d2h"}


def fails(error: BaseException) -> Callable[..., Any]:
    def stop(*args: Any) -> None:
        raise error

    return stop


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Small inputs, and a step bench whose server cannot be started."""
    for name, size in (("_TABLE_ROWS", 6400), ("_NUM_IDS", 640)):
        monkeypatch.setattr(kernels_gpu, name, size)

    def seconds(run: Callable[[], object], num_rounds: int, *, before: Callable[[], object] = lambda: None) -> float:
        before()
        run()
        return 1.0

    monkeypatch.setattr(kernels_gpu, "gpu_module", lambda family, device: None)
    monkeypatch.setattr(kernels_gpu, "_seconds", seconds)
    monkeypatch.setattr(kernels_gpu, "_measure_floors", lambda *args: (1e9, 1e9))
    for name in ("measure_step", "_fused_step"):
        monkeypatch.setattr(kernels_gpu, name, fails(UnavailableError("the server did not start\nfor a reason")))
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
        **dict.fromkeys(_OF_STEPS, "UnavailableError: the server did not start"),
    }
    missing = {name for name, figure in measured.figures.items() if figure is None}
    assert missing - _UNPINNED == {"row_digests_share", *_OF_STEPS}
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
    assert measured.failures["pack_rows_share"] == "KernelsUnavailableError: bitmap.cu does not compile"


def test_shares_are_of_the_fewest_bytes(small: torch.device) -> None:
    """Each input is read once and each output written once, here at a gigabyte a second."""
    figures = kernels_gpu.measure_gpu(small, 1).figures
    num_bytes = {name: round(figures[name] * 1e9) for name in figures if name.endswith("_share")}
    row_bytes, id_bytes = 640 * 512, 640 * 8
    assert num_bytes["pack_rows_share"] == 2 * (row_bytes + id_bytes)
    assert num_bytes["unpack_rows_share"] == 2 * row_bytes + id_bytes
    assert num_bytes["row_digests_share"] == row_bytes + 2 * id_bytes
    assert num_bytes["quantize_int8_share"] == num_bytes["dequantize_int8_share"] > row_bytes + 640 * 128
    assert num_bytes["cut_dirty_share"] > 2 * 64 * 5 * 512  # what was marked before: some ten rows of each table


def test_what_there_is_is_said_after_each_part(small: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that never ends costs no figure that was measured before it."""
    kernels_gpu.measure_gpu(small, 1, ("kernels",))
    said = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines() if "_share: " in line]
    assert said[0] == "pack_rows_share" and said[-1] == "mark_and_cut_share"


def test_the_bench_fails_and_keeps_its_figures(
    small: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a GPU and a part that fails, the JSON has the other figures and the failure, and the exit code is not 0."""
    measure = kernels_gpu.measure_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "measure_gpu", lambda device, *args: measure(small, *args))
    file = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--part=kernels", "--part=step", "--json", str(file)]) == 1
    said = json.loads(file.read_text())
    assert said["gpu"]["cut_dirty_share"] > 0 and said["gpu"]["step_time_ratio_gpu_high"] is None
    assert "UnavailableError" in said["gpu_failures"]["step_time_ratio_gpu_high"]
    assert "MISSED" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["kernels", "step"])
def test_a_part_may_be_measured_alone(small: torch.device, part: str) -> None:
    """Figures of the other part are null without a failure."""
    measured = kernels_gpu.measure_gpu(small, 1, (part,))
    assert (set(measured.failures) >= {*_OF_STEPS}) == (part == "step")
    assert (measured.figures["cut_dirty_share"] is not None) == (part == "kernels")


def test_a_peer_that_is_not_installed_is_no_failure() -> None:
    """Its figures are null with a reason, apart from failures."""
    measured = kernels_gpu.GpuFigures()
    measured.add(FUSED_FIGURES, lambda: kernels_gpu._fused_step(torch.device("cpu"), 1))
    assert set(measured.absent) == set(FUSED_FIGURES) and "fbgemm_gpu" in measured.absent[FUSED_FIGURES[0]]
    assert not measured.failures and measured.figures[FUSED_FIGURES[0]] is None
