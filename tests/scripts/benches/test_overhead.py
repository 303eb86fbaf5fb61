"""`headrace bench overhead`, with a tiny model and few steps: that it measures, not what."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from watched_server import wait_until

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches import overhead
from headrace.scripts.benches.overhead import ModelConfig, make_figures, measure
from headrace.scripts.benches.verdicts import judge

TINY = ModelConfig(num_tables=3, num_rows=5000, dim=8, batch_size=64)


def test_figures_of_a_tiny_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure is there; our time was seen, and rows stayed dirty while the server was stopped.

    The trainer does not warn that the store has tables from the blocks before: that is how the bench is made. The
    streamer's settings come from the environment.
    """
    for name, value in (("FRESHNESS_S", 0.0), ("MAX_COST_PERCENT", 100), ("STAGING_BYTES", 65536)):
        monkeypatch.setenv(f"HEADRACE_STREAMER_{name}", str(value))
    figures = measure(lambda stage: None, num_rounds=1, num_steps=6, model=TINY)
    assert figures["settings"] == {"freshness_s": 0.0, "max_cost_percent": 100, "staging_bytes": 65536}
    assert "before this run" not in capfd.readouterr().err
    assert figures["extra_bytes_bound"] == 15_000 // 8 + 2 * 2**16 + 8 * 2**20
    assert 0 < figures["training_thread_share"] < 1
    # Two buffers are full and stay so; the remaining steps only mark.
    assert figures["outage_num_dirty_rows"] > 0
    assert [len(figures["block_step_ms"][kind]) for kind in ("off", "on", "outage")] == [2, 1, 1]
    memory = figures["block_memory_bytes"]
    assert [len(memory[kind]) for kind in ("off", "on", "outage")] == [1, 1, 1]
    assert figures["extra_bytes"] == memory["on"][0] - memory["off"][0]
    assert figures["outage_extra_bytes"] == memory["outage"][0] - memory["off"][0]


def _is_stopped(pid: int) -> bool:
    try:
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_that_is_stopped_ends_with_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in an outage the server's processes run again, so that they can end."""
    stopped: list[int] = []

    class Interrupted(contextlib.nullcontext[Any]):
        def ask(self, **order: Any) -> dict[str, Any]:
            children = psutil.Process().children(recursive=True)
            if any(_is_stopped(child.pid) for child in children):
                # The shard may stop later than the supervisor.
                (supervisor,) = (child for child in children if "serve" in child.cmdline())
                server = [supervisor.pid, *(shard.pid for shard in supervisor.children())]
                wait_until(lambda: all(map(_is_stopped, server)), "the stop of each process")
                stopped.extend(server)
                raise KeyboardInterrupt
            return {}

        def __enter__(self) -> Self:
            return self

    monkeypatch.setattr(overhead, "Child", lambda *_, **__: Interrupted())
    try:
        with pytest.raises(KeyboardInterrupt):
            measure(lambda stage: None, model=TINY)
    finally:
        left = [pid for pid in stopped if _is_stopped(pid)]
        for pid in left:
            os.kill(pid, signal.SIGCONT)
    assert len(stopped) == 2 and not left


def test_settings_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong streamer setting is refused at once."""
    monkeypatch.setenv("HEADRACE_STREAMER_WINDOW_BYTES", "0")
    with pytest.raises(ConfigError, match=r"WINDOW.BYTES"):
        measure(pytest.fail, model=TINY)


def _block(step_s: float, ours_s: float, memory_bytes: int) -> dict[str, Any]:
    return {
        "step_s": [step_s] * 4,
        "ours_s": 4 * ours_s,
        "memory_bytes": memory_bytes,
        "num_dirty_rows": 0,
    }


def test_figures_and_bounds() -> None:
    """Times are of the steps, memory of the second trainer; each figure is judged against its bound."""
    timed = {"off": [_block(1.0, 0, 0)], "on": [_block(1.04, 0.03, 0)], "outage": [_block(1.0, 0.01, 0)]}
    memory = {"off": [_block(1, 0, 500)], "on": [_block(2, 1, 900)], "outage": [_block(2, 1, 1000)]}
    figures = make_figures(timed, memory, 1000)
    assert figures["step_time_ratio"] == 1.04
    assert figures["training_thread_share"] == pytest.approx(0.03 / 1.04)
    assert (figures["extra_bytes"], figures["outage_extra_bytes"]) == (400, 500)
    assert [verdict.is_met for verdict in judge("overhead", figures)] == [True] * 5
    timed["outage"], memory["outage"] = [_block(1.06, 0.01, 0)], [_block(1, 0, 2000)]
    verdicts = judge("overhead", make_figures(timed, memory, 1000))
    missed = [verdict.name for verdict in verdicts if not verdict.is_met]
    assert missed == ["outage_step_time_ratio", "outage_extra_bytes"]


def test_step_times_are_means_of_blocks_and_medians_of_rounds() -> None:
    """A flush in few of a block's steps counts; one disturbed round does not."""
    flushing = _block(1.0, 0, 0) | {"step_s": [1.0, 1.0, 1.0, 1.8]}
    timed = {
        "off": [_block(s, 0, 0) for s in (0.9, 1.1, 2.0, 2.0, 1.0, 1.0)],
        "on": [flushing, _block(9.0, 0, 0), flushing],
        "outage": [_block(s, 0, 0) for s in (1.1, 2.1, 1.0)],
    }
    memory = {kind: [_block(1, 0, 0)] for kind in timed}
    figures = make_figures(timed, memory, 1000)
    assert figures["step_time_ratio"] == pytest.approx(1.2)
    assert figures["outage_step_time_ratio"] == pytest.approx(1.05)
    assert (figures["step_off_ms"], figures["step_on_ms"]) == pytest.approx((1050, 1200))
