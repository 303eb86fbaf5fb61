"""`headrace bench kernels` runs, compares equal results, and names the figures of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.scripts.benches import kernels
from headrace.scripts.benches.kernels_gpu import GPU_FIGURES


def test_every_operation_has_a_ratio(bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON has a ratio for each operation, and each figure of a GPU, which is null where there is none."""
    # With a GPU gigabytes would be measured: its sizes do not shrink.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures, _ = bench("kernels", "--small", "--rounds=1")
    assert len(figures["cpu"]["ratios"]) == 12 and min(figures["cpu"]["ratios"].values()) > 0
    assert set(figures["gpu"]) == set(GPU_FIGURES) and not figures["gpu_failures"]
    assert set(figures["gpu"].values()) == {None}


def test_a_wrong_answer_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed whose result differs from plain PyTorch's."""
    monkeypatch.setattr(kernels, "row_digests", lambda row_ids, columns: row_ids)
    config = kernels.KernelsConfig(num_rounds=1, num_rows=10_000, num_steps=1, step_ids=10)
    with pytest.raises(AssertionError, match="row_digests"):
        kernels.measure_cpu(config, lambda stage: None)
