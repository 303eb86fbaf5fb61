"""`headrace bench recovery`: how fast a shard that was killed applies what its log has and its store has not."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from headrace.paramserver.config.server_config import DEFAULT_PORT
from headrace.paramserver.reading.shard_link import Dial
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.supervisor.launch import ServerProcess
from headrace.schemas.errors import HeadraceError
from headrace.scripts.benches.bench_ingest import serve
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
from headrace.scripts.benches.bench_rows import WIRE_ROW_BYTES, RowsConfig
from headrace.scripts.benches.bench_writer import WriterProcess

__all__ = ["RecoveryConfig", "RecoveryResult", "recovery", "run"]

_TIMEOUT_S, _POLL_S = 60.0, 0.01
_BATCH_BYTES = 4095 * WIRE_ROW_BYTES  # of uniform ids, about


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """How much is measured.

    Attributes:
        log_bytes: Log that the start finds unapplied, bytes.
        num_rounds: Writing and recovering are measured so often; the medians count.
        folder: Where files go; None for the system's temporary folder.
    """

    log_bytes: int = 1 << 30
    num_rounds: int = 3
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 2 * self.num_rounds

    @property
    def num_batches(self) -> int:
        """Batches that make such a log."""
        return max(1, self.log_bytes // _BATCH_BYTES)


@dataclass(kw_only=True, slots=True)
class RecoveryResult:
    """What was measured.

    Attributes:
        log_bytes: Rows in the log, as they travel.
        sustained: Rows a second of each round, sent, on disk and applied.
        recovered: Rows a second of each round, applied from the log.
    """

    log_bytes: int = 0
    sustained: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the figures, the ratio of the medians first."""
        sustained, recovered = median(self.sustained), median(self.recovered)
        return {
            "ratio_recovery_vs_sustained": recovered / sustained,
            "log_bytes": self.log_bytes,
            "recovery_s": median([self.log_bytes / WIRE_ROW_BYTES / rate for rate in self.recovered]),
            "median_rows_per_s": {"sustained": sustained, "recovered": recovered},
            "median_bytes_per_s": {
                "sustained": sustained * WIRE_ROW_BYTES,
                "recovered": recovered * WIRE_ROW_BYTES,
            },
            "rows_per_s": {"sustained": self.sustained, "recovered": self.recovered},
        }


def recovery(
    *,
    json_path: JsonOption = None,
    folder: FolderOption = None,
    rounds: RoundsOption = 3,
    mebibytes: Annotated[int, typer.Option(min=1, help="Unapplied log that the start finds, MiB.")] = 1024,
) -> None:
    """Measure how fast a shard that was killed applies what its log has and its store has not.

    It is held against the rate at which the same rows came in: sent, on disk and applied.

    Raises:
        ConfigError: A path cannot be written.
        UnavailableError: A process has ended or does not start.
    """
    check_json(json_path)
    config = RecoveryConfig(log_bytes=mebibytes << 20, num_rounds=rounds, folder=check_folder(folder))
    with show_progress("recovery", config.num_stages) as on_stage:
        result = run(config, on_stage=on_stage)
    conclude(result.to_json(), json_path)


def run(config: RecoveryConfig, *, on_stage: OnStage) -> RecoveryResult:
    """Measure; processes and files are gone when this returns or raises.

    The store is removed while the server is down: so the log is unapplied to its first record.

    Args:
        config: How much.
        on_stage: Told in a few words what begins.

    Raises:
        UnavailableError: A process has ended or does not start.
        HeadraceError: The server did not say how long it took.
    """
    result = RecoveryResult()
    with ExitStack() as stack:
        folder = stack.enter_context(bench_folder(config.folder))
        num_batches = config.num_batches
        writer = stack.enter_context(WriterProcess(RowsConfig(ids="uniform", num_batches=num_batches)))
        for number in range(config.num_rounds):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                data_dir = Path(place) / "data"
                on_stage(f"round {number + 1}: writing")
                with serve(data_dir) as server:
                    written = writer.write(server.address, num_batches=num_batches)
                    server.kill()
                result.log_bytes = written.wire_bytes
                result.sustained.append(written.num_rows / written.applied_s)
                for store in data_dir.glob("shard-*/store"):
                    shutil.rmtree(store)
                on_stage(f"round {number + 1}: recovering")
                with serve(data_dir, timeout_s=600.0) as server:
                    result.recovered.append(written.num_rows / _recovery_s(server))
                    server.kill()
    return result


def _recovery_s(server: ServerProcess) -> float:
    """Return how long the server took from opening its log until its store had all of it."""
    asyncio.run(_wait_applied(server.address))
    end = time.time()
    for fact in server.read_log():
        if fact.get("message") == "recovered":
            # It serves as soon as all is in memory; the rest is applied meanwhile.
            return end - datetime.fromisoformat(fact["time"]).timestamp() + float(fact["seconds"])
    raise HeadraceError("the server found nothing to recover; its log has no line about it")


async def _wait_applied(address: str) -> None:
    dial = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=_TIMEOUT_S)
    client, _ = await dial.connect(*parse_address(address, default_port=DEFAULT_PORT))
    async with client:
        while (status := await client.status()).applied_seq < status.log_seq:  # noqa: ASYNC110 (it is far away)
            await asyncio.sleep(_POLL_S)
