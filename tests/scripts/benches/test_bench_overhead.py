"""`headrace bench overhead`, with a tiny model and few steps: that it measures, not what."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any, Self

import pytest

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches import bench_overhead
from headrace.scripts.benches.bench_overhead import OverheadConfig, OverheadResult, describe, run
from headrace.scripts.benches.bench_overhead_trainer import Block, BlockConfig, ModelConfig

TINY = ModelConfig(num_tables=3, num_rows=5000, dim=8, batch_size=64, num_batches=4)


def test_figures_of_a_tiny_run(capfd: pytest.CaptureFixture[str]) -> None:
    """Every figure is there; rows were sent, our time was seen, and rows stayed dirty while the server stood still.

    The trainer warns of nothing: that the store has tables from the blocks before is how the bench is made.
    """
    stages: list[str] = []
    config = OverheadConfig(
        model=TINY, num_rounds=1, num_steps=6, num_warm_steps=2, settings={"staging_bytes": 2**16, "flush_percent": 100}
    )
    result = run(config, on_stage=stages.append)
    assert len(stages) == config.num_stages == 7
    assert "before this run" not in capfd.readouterr().err
    figures = result.to_json()
    assert figures["extra_bytes_bound"] == 15_000 // 8 + 2 * 2**16
    assert figures["num_rows_sent"] > 100
    assert 0 < figures["training_thread_share"] < 1
    assert 0 < figures["outage_training_thread_share"] < 1
    # Two buffers are filled and stay so: the rest of the steps only mark.
    assert figures["outage_num_dirty_rows"] > 0
    assert [len(figures["block_step_ms"][kind]) for kind in ("off", "on", "outage")] == [2, 1, 1]
    assert [len(block.step_s) for block in (*result.off, *result.on, *result.away)] == [6, 6, 6, 6]
    assert all(block.ours_s == [0.0] * 6 for block in result.off)
    memory = figures["block_memory_bytes"]
    assert [len(memory[kind]) for kind in ("off", "on", "outage")] == [1, 1, 1]
    assert figures["extra_bytes"] == memory["on"][0] - memory["off"][0]
    assert figures["outage_extra_bytes"] == memory["outage"][0] - memory["off"][0]


def _is_stopped(pid: int) -> bool:
    try:
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_that_is_stopped_ends_with_the_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C kills a trainer that has stopped the server's processes, and nobody else would let them go on."""
    stopped: list[int] = []

    class Interrupted(contextlib.nullcontext[Any]):
        def train(self, block: BlockConfig) -> Block:
            for pid in block.stopped_pids:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
            if stopped:
                raise KeyboardInterrupt
            return _block(1.0, 0.0, 0)

        def __enter__(self) -> Self:
            return self

    monkeypatch.setattr(bench_overhead, "TrainerProcess", lambda *_, **__: Interrupted())
    try:
        with pytest.raises(KeyboardInterrupt):
            run(OverheadConfig(model=TINY, folder=tmp_path), on_stage=lambda _: None)
    finally:
        left = [pid for pid in stopped if _is_stopped(pid)]
        for pid in left:
            os.kill(pid, signal.SIGCONT)
    assert len(stopped) == 2 and not left


def test_settings_are_checked_before_anything_starts() -> None:
    """A wrong streamer setting is refused at once."""
    with pytest.raises(ConfigError, match=r"flush.percent"):
        run(OverheadConfig(model=TINY, settings={"flush_percent": 0}), on_stage=pytest.fail)


def _block(step_s: float, ours_s: float, memory_bytes: int, **changes: Any) -> Block:
    fields: dict[str, Any] = {
        "step_s": [step_s] * 4,
        "ours_s": [ours_s] * 4,
        "ours_cpu_s": 4 * ours_s,
        "thread_cpu_s": 4 * step_s,
        "cpu_s": 4 * step_s,
        "memory_bytes": memory_bytes,
        "num_rows_sent": 10,
        "num_dirty_rows": 0,
    }
    return Block(**{**fields, **changes})


def test_bounds_are_judged() -> None:
    """Each figure stands beside its bound, and one that is over it is called missed."""
    result = OverheadResult(bound_bytes=1000)
    result.off, result.on, result.away = [_block(1.0, 0, 0)], [_block(1.04, 0.03, 0)], [_block(1.0, 0.01, 0)]
    result.memory_off, result.memory_on = [_block(1, 0, 500)], [_block(2, 1, 900)]
    result.memory_away = [_block(2, 1, 1000)]
    lines, is_within = describe(result.to_json())
    assert is_within
    assert "MISSED" not in "\n".join(lines)
    result.away, result.memory_away = [_block(1.06, 0.01, 0)], [_block(1, 0, 2000)]
    lines, is_within = describe(result.to_json())
    assert not is_within
    assert sum("MISSED" in line for line in lines) == 2
