"""Compare the copies of tables that ranks keep equal: each rank streams a share of the rows, so the store has of each.

Copies drift without an error, for example under `DistributedDataParallel` where a loop calls the module inside of it.
An audit compares all rows of the copies. Between audits `CopyWatch` compares some rows now and then. It waits for no
rank: each leaves digests for the others, and compares those that it finds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.kernels.digests import row_digests
from headrace.paramserver.reading.differences import MAX_NAMED
from headrace.schemas.row_digest import BUCKET_ROWS
from headrace.streamer.taps.local_parts import TableCopy
from headrace.streamer.world import World

__all__ = ["CopyDifference", "CopyDigests", "CopyWatch", "differing_copies", "digest_copies"]

_log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 8192
# Rows of each copy that are compared between audits.
_NUM_SAMPLED = 1024
# Steps between two comparisons, once a run is long; at first they are at the powers of two.
_INTERVAL = 1024
# Samples that a rank remembers, because another rank may be some steps behind.
_NUM_REMEMBERED = 4

_Digests = npt.NDArray[np.uint64]
_Key = tuple[str, tuple[int, ...], int, int]
CopyDigests = dict[_Key, list[int]]
"""Sums of the row digests of a copy's buckets (local row / 65536), by what `TableCopy.key` says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyDifference:
    """Copies of a table, or of a part of it, that are not equal.

    Attributes:
        fqn: The table.
        ranks: The ranks that should have the same rows.
        differing_ranks: Those of them whose rows are not those of the first.
        differing_row_ids: The first rows in which they differ, global.
    """

    fqn: str
    ranks: tuple[int, ...]
    differing_ranks: tuple[int, ...]
    differing_row_ids: tuple[int, ...]

    def __str__(self) -> str:
        """Describe the difference in one line."""
        ranks, others = (", ".join(map(str, each)) for each in (self.ranks, self.differing_ranks))
        rows = ", ".join(map(str, self.differing_row_ids))
        return (
            f"{self.fqn}: ranks {ranks} should have the same rows, and rank {others} has not those of rank "
            f"{self.ranks[0]}: rows {rows}: each streams a share, so the store has no rank's table; train through the "
            f"wrapper that keeps them equal"
        )


def digest_copies(copies: Iterable[TableCopy]) -> CopyDigests:
    """Return digests of all rows of this rank's copies. REQUIRES: no training meanwhile."""
    return {
        copy.key: [
            int(_digests(copy, range(first, min(first + BUCKET_ROWS, copy.num_rows))).sum(dtype=np.uint64))
            for first in range(0, copy.num_rows, BUCKET_ROWS)
        ]
        for copy in copies
    }


def differing_copies(
    copies: Iterable[TableCopy], digests: Sequence[CopyDigests], gather: Callable[[Callable[[], Any]], list[Any]]
) -> list[CopyDifference]:
    """Return the copies that differ, on all ranks the same; all ranks call it together.

    Args:
        copies: Of this rank.
        digests: What `digest_copies` has returned on each rank, by rank.
        gather: Returns, on every rank, what a function returns on each, by rank.
    """
    keys = dict.fromkeys(key for of_rank in digests for key in of_rank)
    differing = {
        key: bucket
        for key in keys
        if (bucket := _first_difference([of_rank[key] for of_rank in digests if key in of_rank])) is not None
    }
    if not differing:
        return []

    def rows_here() -> dict[_Key, tuple[_Digests, npt.NDArray[np.int64]]]:
        by_key = {copy.key: copy for copy in copies}
        rows = {key: _bucket(by_key[key], bucket) for key, bucket in differing.items() if key in by_key}
        return {key: (_digests(by_key[key], each), by_key[key].row_ids(each)) for key, each in rows.items()}

    gathered = gather(rows_here)
    return [_difference(key, digests, [rows.get(key) for rows in gathered]) for key in differing]


def _difference(key: _Key, digests: Sequence[CopyDigests], rows: Sequence[Any]) -> CopyDifference:
    """Describe a difference by what each rank has of the first differing bucket: row digests and ids, or None."""
    holders = [rank for rank, each in enumerate(rows) if each is not None]
    first, row_ids = rows[holders[0]]
    differs = np.logical_or.reduce([rows[rank][0] != first for rank in holders])
    return CopyDifference(
        fqn=key[0],
        ranks=key[1],
        differing_ranks=tuple(rank for rank in holders if digests[rank][key] != digests[holders[0]][key]),
        differing_row_ids=tuple(row_ids[differs][:MAX_NAMED].tolist()),
    )


class CopyWatch:
    """Compares some rows of the copies at some steps, and warns once. Waits for no rank, so that nothing can hang.

    Each rank leaves digests of the same rows, which the step number chooses, in the process group's store. It compares
    what the others have left with what it had at the same step itself.

    Thread: the training thread's.
    """

    def __init__(self, world: World, name: str) -> None:
        """Compare with the ranks of a world; `name` is the streamer's, the same on all of them."""
        self._world, self._name = world, name
        self._samples: dict[int, dict[str, int]] = {}  # own ones, by step
        self._is_over = world.size == 1

    def on_step(self, step: int, find: Callable[[], Iterable[TableCopy]]) -> None:
        """Compare the copies at the end of a step, if it is one at which all ranks do."""
        if self._is_over or not _is_compared(step):
            return
        copies = list(find())
        on_gpu = any(tensor.is_cuda for copy in copies for tensor in copy.tensors())
        if not copies or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return  # reading rows now would fail the capture
        sample = {f"{copy.fqn} {copy.key[1:]}": _sample(copy, step) for copy in copies}
        self._samples[step] = sample
        for earlier in sorted(self._samples)[:-_NUM_REMEMBERED]:
            del self._samples[earlier]
        try:
            notes = self._world.leave_note(self._name, json.dumps({"step": step, "sample": sample}))
        except RuntimeError as exc:  # the store's process has ended
            self._is_over = True
            _log.info("copies of tables are compared in audits only: %s", exc)
            return
        for rank, note in enumerate(notes):
            if note and (fqn := self._differing(json.loads(note))) is not None:
                self._is_over = True
                _log.warning(
                    "table %s: the copies on ranks %d and %d differ; each streams a share of the rows, so the store "
                    "has no rank's table: train through the wrapper that keeps them equal; audit() names the rows",
                    fqn,
                    self._world.rank,
                    rank,
                )
                return

    def _differing(self, note: Mapping[str, Any]) -> str | None:
        own = self._samples.get(note["step"], {})
        return next(
            (key.rpartition(" (")[0] for key, digest in note["sample"].items() if own.get(key, digest) != digest), None
        )


def _is_compared(step: int) -> bool:
    return step > 0 and (step % _INTERVAL == 0 or (step < _INTERVAL and step & (step - 1) == 0))


def _sample(copy: TableCopy, step: int) -> int:
    if copy.num_rows <= _NUM_SAMPLED:
        return int(_digests(copy, range(copy.num_rows)).sum(dtype=np.uint64))
    rows = np.sort(np.random.default_rng(step).integers(0, copy.num_rows, _NUM_SAMPLED))
    return int(_digests_at(copy, rows).sum(dtype=np.uint64))


def _bucket(copy: TableCopy, bucket: int) -> range:
    return range(bucket * BUCKET_ROWS, min((bucket + 1) * BUCKET_ROWS, copy.num_rows))


def _first_difference(digests: Sequence[Sequence[int]]) -> int | None:
    """Return the first bucket in which copies differ."""
    return next((bucket for bucket, values in enumerate(zip(*digests, strict=True)) if len(set(values)) > 1), None)


def _digests(copy: TableCopy, rows: range) -> _Digests:
    """Return the digests of consecutive local rows."""
    found = [
        _digests_at(copy, np.arange(first, min(first + _ROWS_AT_ONCE, rows.stop)))
        for first in range(rows.start, rows.stop, _ROWS_AT_ONCE)
    ]
    return np.concatenate(found) if found else np.empty(0, np.uint64)


def _digests_at(copy: TableCopy, rows: npt.NDArray[np.int64]) -> _Digests:
    tensors = copy.tensors()
    index = torch.from_numpy(rows).to(tensors[0].device)
    digests: _Digests = (
        row_digests(index, [tensor.index_select(0, index) for tensor in tensors]).cpu().numpy().view(np.uint64)
    )
    return digests
