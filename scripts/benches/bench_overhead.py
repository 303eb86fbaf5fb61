"""`headrace bench overhead`: what streaming costs a trainer, in step time and memory, with the server up and away.

Blocks of training steps with streaming off and on take turns in one process, on one processor, with the server on
another. In a second kind of block the server's processes are stopped, as if the network had gone: training must not
notice.

Memory is that of a second trainer, whose C library gives large blocks back as soon as they are freed. By default it
keeps them in its heap, and what steps of the trainer alone leave there moves by tens of MiB. As that costs page faults,
the second trainer's time is not looked at.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.bench_overhead_trainer import Block, BlockConfig, ModelConfig, TrainerProcess
from headrace.scripts.benches.bench_report import (
    FolderOption,
    JsonOption,
    OnStage,
    RoundsOption,
    bench_folder,
    check_folder,
    check_json,
    conclude,
    show_progress,
)
from headrace.scripts.benches.bench_report_targets import MAX_STEP_TIME_RATIO, MAX_TRAINING_THREAD_SHARE
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flush.staging import NUM_STAGING_BUFFERS

__all__ = ["OverheadConfig", "OverheadResult", "overhead", "run"]

_MIB = 2**20
# Of glibc; another C library does not know it. The value is its default, which without the variable grows with use.
_GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


@dataclass(frozen=True, kw_only=True, slots=True)
class OverheadConfig:
    """How much is measured.

    Attributes:
        model: What is trained.
        num_rounds: Rounds of four blocks: off, on, off, on with the server stopped; and then of two for memory: on, on
            with the server stopped, after one that is off.
        num_steps: Measured steps of a block.
        num_warm_steps: Steps before them that do not count: a streamer's first flush, and caches after a switch.
        settings: Of the streamer; its defaults else.
        folder: Where the server's files go; None for the system's temporary folder.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    num_rounds: int = 4
    num_steps: int = 60
    num_warm_steps: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 6 * self.num_rounds + 1


@dataclass(kw_only=True, slots=True)
class OverheadResult:
    """What was measured.

    Attributes:
        bound_bytes: One bit a row, and the staging buffers.
        off: Blocks without streaming.
        on: Blocks with it.
        away: Blocks with it and the server stopped.
        memory_off, memory_on, memory_away: The blocks for memory.
    """

    bound_bytes: int
    off: list[Block] = field(default_factory=list)
    on: list[Block] = field(default_factory=list)
    away: list[Block] = field(default_factory=list)
    memory_off: list[Block] = field(default_factory=list)
    memory_on: list[Block] = field(default_factory=list)
    memory_away: list[Block] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        memory_off, memory_on, memory_away = (
            max(block.memory_bytes for block in blocks)
            for blocks in (self.memory_off, self.memory_on, self.memory_away)
        )
        return {
            "step_time_ratio": _step_s(self.on) / _step_s(self.off),
            "training_thread_share": _share(self.on),
            "extra_bytes": memory_on - memory_off,
            "extra_bytes_bound": self.bound_bytes,
            "outage_step_time_ratio": _step_s(self.away) / _step_s(self.off),
            "outage_training_thread_share": _share(self.away),
            "outage_extra_bytes": memory_away - memory_off,
            "outage_growth_bytes": memory_away - memory_on,
            "training_thread_cpu_share": _cpu_share(self.on),
            "cpu_time_ratio": _cpu_s(self.on) / _cpu_s(self.off),
            "outage_cpu_time_ratio": _cpu_s(self.away) / _cpu_s(self.off),
            "step_off_ms": _step_s(self.off) * 1000,
            "step_on_ms": _step_s(self.on) * 1000,
            "outage_step_ms": _step_s(self.away) * 1000,
            "num_rows_sent": sum(block.num_rows_sent for block in self.on),
            "outage_num_dirty_rows": max(block.num_dirty_rows for block in self.away),
            "block_step_ms": {
                name: [median(block.step_s) * 1000 for block in blocks]
                for name, blocks in (("off", self.off), ("on", self.on), ("outage", self.away))
            },
            "block_memory_bytes": {
                name: [block.memory_bytes for block in blocks]
                for name, blocks in (
                    ("off", self.memory_off),
                    ("on", self.memory_on),
                    ("outage", self.memory_away),
                    ("default_heap_off", self.off),
                    ("default_heap_on", self.on),
                    ("default_heap_outage", self.away),
                )
            },
        }


def overhead(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rounds: RoundsOption = 4,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a block.")] = 60,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A streamer setting; may be repeated.", show_default=False),
    ] = None,
) -> int:
    """Measure what streaming costs a trainer: step time and memory, with the server up and stopped.

    The trainer, a DLRM of 26 tables in FBGEMM's table-batched module with fused rowwise Adagrad, has one processor and
    the server another. Exit code 1 when a figure misses its bound.

    Raises:
        ConfigError: A path cannot be written, or a setting is wrong.
        UnavailableError: A process has ended or does not start.
    """
    check_json(json_path)
    config = OverheadConfig(
        num_rounds=rounds, num_steps=steps, settings=_settings(set_ or []), folder=check_folder(folder)
    )
    with show_progress("overhead", config.num_stages) as on_stage:
        figures = run(config, on_stage=on_stage).to_json()
    conclude(figures, json_path)
    lines, is_within = describe(figures)
    typer.echo("\n".join(lines))
    return 0 if is_within else 1


def run(config: OverheadConfig, *, on_stage: OnStage) -> OverheadResult:
    """Measure; processes and files are gone when this returns or raises.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        ConfigError: A setting of the streamer is wrong.
        UnavailableError: A process has ended or does not start.
    """
    staging_bytes = StreamerConfig.load(**config.settings).staging_bytes
    result = OverheadResult(bound_bytes=config.model.total_rows // 8 + NUM_STAGING_BUFFERS * staging_bytes)
    trainer_cpu, server_cpu = _two_processors()
    with bench_folder(config.folder) as folder:
        with _on(server_cpu):
            server = ServerProcess.start(folder / "data", shards=1)
        with server, _continued_at_end(server):
            with _on(trainer_cpu):
                trainer = TrainerProcess(config.model)
            with trainer:
                for number in range(config.num_rounds):
                    for kind, blocks in (("off", result.off), ("on", result.on), ("off", result.off)):
                        on_stage(f"round {number + 1}: streaming {kind}")
                        blocks.append(trainer.train(_block(config, server, kind)))
                    on_stage(f"round {number + 1}: streaming on, server stopped")
                    result.away.append(trainer.train(_block(config, server, "away")))
            with _on(trainer_cpu):
                trainer = TrainerProcess(config.model, environ=_GIVES_BACK)
            with trainer:
                # Before the first streamer, so that nothing that a streamer leaves behind counts as the trainer's own.
                on_stage("memory: streaming off")
                result.memory_off.append(trainer.train(_block(config, server, "off")))
                for number in range(config.num_rounds):
                    on_stage(f"memory, round {number + 1}: streaming on")
                    result.memory_on.append(trainer.train(_block(config, server, "on")))
                    on_stage(f"memory, round {number + 1}: streaming on, server stopped")
                    result.memory_away.append(trainer.train(_block(config, server, "away")))
    return result


def describe(figures: dict[str, Any]) -> tuple[list[str], bool]:
    """Return lines that set the figures beside their bounds, and whether all are within."""
    bound = figures["extra_bytes_bound"]
    checks = [
        ("step time, on / off", figures["step_time_ratio"], MAX_STEP_TIME_RATIO, "{:.3f}"),
        ("step time, server stopped / off", figures["outage_step_time_ratio"], MAX_STEP_TIME_RATIO, "{:.3f}"),
        ("share of the training thread", figures["training_thread_share"], MAX_TRAINING_THREAD_SHARE, "{:.4f}"),
        ("memory added, MiB", figures["extra_bytes"] / _MIB, bound / _MIB, "{:.1f}"),
        ("memory added, server stopped, MiB", figures["outage_extra_bytes"] / _MIB, bound / _MIB, "{:.1f}"),
    ]
    lines = [
        f"{name:36s}{form.format(value):>9s}   bound {form.format(limit)}   {'ok' if value <= limit else 'MISSED'}"
        for name, value, limit, form in checks
    ]
    lines.append(
        f"median step {figures['step_off_ms']:.1f} ms off, {figures['step_on_ms']:.1f} ms on, "
        f"{figures['outage_step_ms']:.1f} ms with the server stopped; processor time, all threads, on / off "
        f"{figures['cpu_time_ratio']:.3f}, ours on the training thread {figures['training_thread_cpu_share']:.4f}"
    )
    return lines, all(value <= limit for _, value, limit, _ in checks)


def _block(config: OverheadConfig, server: ServerProcess, kind: str) -> BlockConfig:
    return BlockConfig(
        address=None if kind == "off" else server.address,
        num_warm_steps=config.num_warm_steps,
        num_steps=config.num_steps,
        stopped_pids=[server.pid, *server.shard_pids] if kind == "away" else [],
        settings=config.settings,
    )


def _settings(pairs: list[str]) -> dict[str, Any]:
    """Return `NAME=VALUE` pairs as settings, each value as its field's type."""
    types = {field.name: field.type for field in dataclasses.fields(StreamerConfig)}
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        kind = types.get(name)
        try:
            settings[name] = int(value) if kind == "int" else float(value) if kind == "float" else value
        except ValueError as exc:
            raise ConfigError(f"--set {pair}: {value!r} is no number") from exc
    return settings


def _step_s(blocks: list[Block]) -> float:
    return median([seconds for block in blocks for seconds in block.step_s])


def _share(blocks: list[Block]) -> float:
    """Of all the time, not of the median step: a flush is not in every step."""
    return sum(sum(block.ours_s) for block in blocks) / sum(sum(block.step_s) for block in blocks)


def _cpu_share(blocks: list[Block]) -> float:
    return sum(block.ours_cpu_s for block in blocks) / sum(block.thread_cpu_s for block in blocks)


def _cpu_s(blocks: list[Block]) -> float:
    return sum(block.cpu_s for block in blocks) / sum(len(block.step_s) for block in blocks)


def _two_processors() -> tuple[int, int]:
    """Return a processor for the trainer and another for the server, or the same one where there is no other."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


@contextmanager
def _on(processor: int) -> Iterator[None]:
    """Start the processes of the block on one processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _continued_at_end(server: ServerProcess) -> Iterator[None]:
    """Let the server run again at the end: a trainer that was killed has left it stopped, and so it would not end."""
    pids = [server.pid, *server.shard_pids]
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
