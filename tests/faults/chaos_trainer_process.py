"""The trainer of the chaos harness, as the harness sees it: a process that is started, flushed and killed."""

from __future__ import annotations

import threading
from typing import Any

from chaos_ledger import Ledger
from chaos_served import Outputs, Seen
from chaos_trainer import TrainerOrder, run_trainer
from processes import ChaosError, Worker

from headrace.schemas.version import Version

__all__ = ["Trainer"]


class Trainer(Worker):
    """A trainer process and what it has reported."""

    def __init__(self, order: TrainerOrder, ledger: Ledger, outputs: Outputs, lock: threading.Lock) -> None:
        """Start the process, and return when it trains."""
        self._ledger, self._outputs, self._lock = ledger, outputs, lock
        super().__init__("the trainer", run_trainer, order)
        try:
            self.expect("ready")
        except BaseException:
            self.kill()
            raise

    def take(self, report: tuple[Any, ...]) -> bool:
        kind, *told = report
        with self._lock:
            if kind == "acked":
                self._ledger.take(told[0], shard=told[1], seq=told[2])
            elif kind == "computed":
                self._outputs.note(Seen(*told))
        return kind in ("acked", "computed")

    def flush(self) -> dict[str, Version]:
        """Let it send everything, wait until it is acked, and compare the store with its tables.

        Return the version of each model; nothing follows until `go_on`.
        """
        self.send("flush")
        is_equal, text, versions = self.expect("flushed")
        if not is_equal:
            raise ChaosError(f"after the flush the store differs from the trainer: {text}")
        return dict(versions)

    def go_on(self) -> None:
        """Let it train again after a flush."""
        self.send("go on")
