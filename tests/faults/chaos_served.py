"""The serving side of the chaos harness: a process with a served copy of each model, whose outputs are the trainer's.

The trainer notes its outputs on a fixed batch at every step, before anything of the step is streamed. Whatever step a
served copy shows, at any moment, its outputs are those, bit for bit; and after a flush it shows the step of the flush.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from chaos_model import Ranker, compute
from processes import WAIT_S, Worker
from waiting import wait_until

from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.dense_parts import DensePart
from headrace.paramserver.replica import EmbeddingReplica, serve_model
from headrace.paramserver.replica.api import lookups
from headrace.schemas.errors import UnavailableError
from headrace.schemas.table_names import model_of
from headrace.schemas.tables import DType
from headrace.schemas.version import Version

__all__ = ["BREAKAGES", "Outputs", "Seen", "ServedCopies", "Settled"]

_NUM_KEPT = 20_000
_LOOK_PAUSE_S = 0.005
# A copy that begins anew behind an old snapshot applies all of the log since, on a machine that does much else.
_SETTLE_S = 2 * WAIT_S
_BEFORE_ANY: Version = (0, -1)


class Seen(NamedTuple):
    """What a served copy computed of the probe, or the trainer at the same step."""

    model: str
    version: Version
    outputs: bytes


class Settled(NamedTuple):
    """What the serving process says once its copies have come to a version.

    Attributes:
        seen: What was computed since the last time.
        rows: Bytes of the rows that were asked for, one after the other, by fqn.
    """

    seen: Sequence[Seen]
    rows: Mapping[str, bytes]


class Outputs:
    """What the trainer computed at its newest steps, and what served copies were seen to compute. Not thread-safe.

    Attributes:
        num_compared: Outputs of served copies.
        found: How many of those were `wrong` (of several steps, or other bytes), of an `unknown` step, or `stale` (the
            copies went back).
    """

    def __init__(self) -> None:
        self.num_compared = 0
        self.found: Counter[str] = Counter()
        self._trained: OrderedDict[tuple[str, Version], bytes] = OrderedDict()
        self._newest: dict[tuple[str, str], Version] = {}

    def note(self, trained: Seen) -> None:
        """Keep what the trainer computed."""
        self._trained[trained.model, trained.version] = trained.outputs
        if len(self._trained) > _NUM_KEPT:
            self._trained.popitem(last=False)

    def compare(self, served: Iterable[Seen], *, of: str = "", may_go_back: bool = False) -> list[str]:
        """Compare what the served copies of a process computed, in this order; return a line for each unsound one.

        They `may_go_back`, to a step that was trained, where the server lacks what it had.
        """
        lines = []
        for model, version, outputs in served:
            self.num_compared += 1
            newest = self._newest.get((of, model), _BEFORE_ANY)
            self._newest[of, model] = max(version, newest)
            expected = self._trained.get((model, version))
            kind = "unknown" if expected is None else "wrong" if outputs != expected else "stale"
            if kind != "stale" or (version < newest and not may_go_back):
                self.found[kind] += 1
                lines.append(f"{kind} outputs of the served copy by {of} of {model!r} at {version}, after {newest}")
        return lines


class ServedCopies(Worker):
    """The serving process, as the harness sees it."""

    def __init__(self, address: str, models: Sequence[str], breakage: str, log_path: Path) -> None:
        """Start the process, which logs to a file; its copies are there at the first `settle`."""
        super().__init__(f"the copies of {address}", _run, address, models, breakage, log_path)

    def settle(self, versions: Mapping[str, Version], row_ids: Mapping[str, npt.NDArray[np.int64]]) -> Settled:
        """Return what was computed since the last time, at the end at these versions, and rows of these tables."""
        self.send((versions, row_ids))
        (settled,) = self.expect("settled")
        return settled  # type: ignore[no-any-return]


def _run(address: str, models: Sequence[str], breakage: str, log_path: Path, requests: Connection) -> None:
    """Serve until killed; the process's main function. Takes what `settle` sends, and answers as it returns."""
    torch.set_num_threads(1)
    log_format = f"%(asctime)s {os.getpid()} %(levelname)s %(message)s"
    logging.basicConfig(filename=log_path, level=logging.WARNING, format=log_format, force=True)
    BREAKAGES[breakage]()
    try:
        copies = [_ServedCopy(address, model) for model in models]
        while True:
            versions, row_ids = requests.recv()
            seen = [seen for served in copies for seen in served.settle(versions[served.model])]
            rows = {fqn: rows for served in copies for fqn, rows in served.rows(row_ids).items()}
            requests.send(("settled", Settled(seen, rows)))
    except EOFError:
        return  # the harness has ended
    except Exception:
        requests.send(("failed", traceback.format_exc()))


def _open(address: str, model: str) -> EmbeddingReplica:
    """Open a replica, again while a follower begins anew."""

    def find() -> EmbeddingReplica | None:
        with contextlib.suppress(UnavailableError):
            return EmbeddingReplica(address, model=model, consistency="step", open_timeout_s=2 * WAIT_S)
        return None

    replica = wait_until(find, f"a copy of {model!r} of {address}", within_s=2 * WAIT_S)
    assert replica is not None
    return replica


class _ServedCopy:
    """A replica, a served copy over it, and a thread that computes with it all the time."""

    def __init__(self, address: str, model: str) -> None:
        self.model = model
        self._replica = _open(address, model)
        with torch.device("meta"):
            whole = Ranker()
        self._served = serve_model(whole, self._replica, model=model)
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._problem = ""
        threading.Thread(target=self._look_on, name=f"served-{model}", daemon=True).start()

    def settle(self, version: Version) -> list[Seen]:
        """Wait for a version, and return all that was computed since the last time."""
        self._replica.wait_for(version[1], _SETTLE_S, epoch=version[0])
        self._look()
        with self._lock:
            if self._problem:
                raise RuntimeError(self._problem)
            if self._seen and self._seen[-1].version != version:
                raise UnavailableError(f"model {self.model!r} is at {self._seen[-1].version}, not at {version}")
            seen, self._seen = self._seen, []
        return seen

    def rows(self, row_ids: Mapping[str, npt.NDArray[np.int64]]) -> dict[str, bytes]:
        """Return the bytes of rows of its model's tables."""
        wanted = {fqn: ids for fqn, ids in row_ids.items() if model_of(fqn) == self.model}
        return {fqn: bits_of(rows).tobytes() for fqn, rows in self._replica.lookup_many(wanted).items()}

    def _look(self) -> None:
        """Compute once, and note it unless it is what was noted last."""
        with self._lock:
            seen = self._replica.at_one_moment(
                lambda: Seen(self.model, (self._replica.epoch, self._replica.step), compute(self._served))
            )
            if self._seen[-1:] != [seen]:
                self._seen.append(seen)

    def _look_on(self) -> None:
        pause = threading.Event()
        while not self._problem:
            try:
                self._look()
            except Exception:  # of whatever kind: no call may fail
                self._problem = traceback.format_exc()
            pause.wait(_LOOK_PAUSE_S)


# Serving that is broken on purpose, to see that it is noticed. In the serving process alone.


def _mix_steps() -> None:
    newest: dict[str | None, DensePart] = {}
    before: dict[str | None, DensePart] = {}
    dense_part = EmbeddingReplica.dense_part

    def part_before(self: EmbeddingReplica, model: str | None = None) -> DensePart:
        part = dense_part(self, model)
        if part is not newest.get(model):
            before[model] = newest.get(model, part)
            newest[model] = part
        return before[model]

    EmbeddingReplica.dense_part = part_before  # type: ignore[method-assign]


def _round_otherwise() -> None:
    tensor_of = lookups.tensor_of

    def nearly(rows: npt.NDArray[Any], dtype: DType) -> torch.Tensor:
        values = tensor_of(rows, dtype)
        return values.half().float() if dtype is DType.FLOAT32 else values

    lookups.tensor_of = nearly


BREAKAGES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "mixes_steps": _mix_steps,
    "rounds_otherwise": _round_otherwise,
}
"""By name: breaks the served copies of this process."""
