"""Which dense part a copy shows when: never mixed, never older, by step with its cut; without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dense_trainer import dense_delta, dense_specs, table_spec, tensor_of
from set_embeddings import request_of
from text_scripts import Script, scripts

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.api.embedding_replica import as_tensor
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.dense import MAX_STEPS_AHEAD, memory_of_dense
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog, pack_spec
from headrace.schemas.errors import CorruptionError, RequestError, UnavailableError, UnknownTableError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.table_names import path_of
from headrace.schemas.tables import DType, TableSpec

TABLE, SPECS = table_spec(), dense_specs()
MUCH = 1 << 30


class Logs:
    """The logs of two shards, which a trainer writes and a copy reads."""

    def __init__(self, *, num_shards: int = 2, specs: list[TableSpec] = SPECS) -> None:
        self._num_shards, self._specs = num_shards, specs
        self._specs_of: dict[int, list[TableSpec]] = {}  # by epoch
        self.updates: list[list[Update]] = [[] for _ in range(num_shards)]
        self._seqs = [0] * num_shards
        self._client_seqs: dict[tuple[int, str], int] = {}

    def begin(self, consistency: str = "step", *, greets: bool = True) -> None:
        """Make a copy, which has the trainer's hello if there is one."""
        tails = [ShardTail(each, seq=0, catalog=Catalog({}), sessions=Sessions({})) for each in range(self._num_shards)]
        self.copy = TableSet("s", tails, is_by_step=consistency == "step", make_table=MemoryTable)
        if greets:
            self.hello()
            self.take()

    def other_architecture(self) -> None:
        """Let the next run have another bias, and a tensor more."""
        shapes = {"fc.bias": ((50,), DType.BFLOAT16), "out.weight": ((1, 50), DType.FLOAT32)}
        self._specs = dense_specs(shapes=shapes)

    def hello(self, *, epoch: int = 1, client: str = "rank0", owns: bool = True, **changes: Any) -> None:
        specs = [TABLE, *self._specs]
        header = {"run": "run", "client": client, "rank": 0, "world_size": 1, "tables": [*map(pack_spec, specs)]}
        header |= {"owned": [spec.fqn for spec in specs] if owns else [], **changes}
        for shard in range(self._num_shards):
            self._client_seqs[shard, client] = 0
            self._append(shard, epoch, idl.UpdateKind.HELLO, header, b"")

    def publish(self, step: int, *, shard: int | None = None, ends_step: bool = True, **changes: Any) -> None:
        """Write all rows of a step, and end it."""
        for each in range(self._num_shards) if shard is None else [shard]:
            self.write(each, step, "table", "dense", ends_step=ends_step, **changes)

    def write(self, shard: int, step: int, *names: str, epoch: int = 1, client: str = "rank0", **changes: Any) -> None:
        """Write a shard's rows of the table, of all dense tensors, of the first of them, or of the others."""
        groups = {"table": [TABLE], "dense": self._specs, "first": self._specs[:1], "others": self._specs[1:]}
        deltas = []
        for spec in (spec for name in names for spec in groups[name]):
            ids = shards_of_rows(table_seed(spec.fqn), np.arange(spec.num_rows), self._num_shards)
            deltas.append(dense_delta(spec, step, (ids == shard).nonzero()[0]))
        self._client_seqs[shard, client] += 1
        self._specs_of[epoch] = self._specs
        fields = {"time_us": step * 1000, "step": step, "epoch": epoch, "client": client, "ends_step": False, **changes}
        self.send(shard, request_of(*deltas, client_seq=self._client_seqs[shard, client], **fields))

    def send(self, shard: int, request: Any) -> None:
        body = b"".join(encode_message("setEmbeddings", CALL, 1, idl.ParameterServer.setEmbeddings_args(request)))
        self._append(shard, request.epoch, idl.UpdateKind.BATCH, {}, body)

    def _append(self, shard: int, epoch: int, kind: int, header: dict[str, Any], body: bytes) -> None:
        self._seqs[shard] += 1
        self.updates[shard].append(Update(self._seqs[shard], epoch, kind, header, memoryview(body)))

    def take(self, *shards: int) -> str:
        """Let the copy take what some shards have, all without any; say what it shows."""
        for shard in shards or range(self._num_shards):
            updates, self.updates[shard] = self.updates[shard], []
            self.copy.take(shard, updates, self._seqs[shard])
        return f"at {self.copy.visible}, rows of step {self.shown_rows}, dense part {self.shown}"

    @property
    def shown(self) -> tuple[int, int] | None:
        """Version of the visible part, whose every element is checked; None before the first."""
        try:
            part = self.copy.dense.part("ctr")
        except UnavailableError:
            return None
        specs = self._specs_of[part.epoch]
        assert part.tensors.keys() == {path_of(spec.fqn) for spec in specs}
        for spec in specs:
            assert torch.equal(as_tensor(part, path_of(spec.fqn)), tensor_of(spec, part.step)), spec.fqn
        return part.version

    @property
    def shown_rows(self) -> int | None:
        """The step that the table's rows tell; None if they tell several."""
        rows = np.unique(self.copy.table("user.weight").gather(np.arange(TABLE.num_rows))[0])
        return int(rows[0]) if rows.size == 1 else None


def begun(consistency: str = "step", **settings: Any) -> Logs:
    logs = Logs(**settings)
    logs.begin(consistency)
    return logs


@scripts(__file__, "dense")
def test_which_part_is_shown(script: Script) -> None:
    """The newest whole one, by step with its rows, whatever runs and ranks do."""
    script.run(Logs())


def test_a_shard_may_not_be_many_dense_steps_ahead() -> None:
    """It waits for the one behind, which never waits; each part is shown with its cut when that catches up."""
    logs = begun()
    logs.publish(1)
    logs.take()
    for step in range(2, 2 + MAX_STEPS_AHEAD):
        assert not logs.copy.is_waiting(0, MUCH)
        logs.publish(step)
        logs.take(0)
    assert logs.copy.is_waiting(0, MUCH) and not logs.copy.is_waiting(1, MUCH)
    assert logs.copy.tails[0].pending_bytes < 100_000, "dense rows do not wait with the others"
    assert logs.copy.size_bytes > MAX_STEPS_AHEAD * memory_of_dense(SPECS) / 2
    updates, logs.updates[1] = logs.updates[1], []
    for seq, update in enumerate(updates, logs.copy.tails[1].seq + 1):
        logs.copy.take(1, [update], seq)
        assert (logs.shown, logs.shown_rows) == (logs.copy.visible, logs.copy.visible[1])
    assert logs.shown == (1, 1 + MAX_STEPS_AHEAD)
    assert not any(logs.copy.is_waiting(shard, MUCH) for shard in range(2))


def test_the_shard_behind_stops_nobody_once_it_is_in_a_newer_run() -> None:
    """Steps that ended with their trainer on one shard only are not waited for."""
    logs = begun("latest")
    for step in range(1, 1 + MAX_STEPS_AHEAD):
        logs.publish(step, shard=0)
    logs.take()
    assert logs.copy.is_waiting(0, MUCH) and not logs.copy.is_waiting(1, MUCH)
    logs.hello(epoch=2)
    logs.take(1)
    assert not logs.copy.is_waiting(0, MUCH)


def test_a_cut_whose_part_was_given_up_is_not_shown() -> None:
    """Memory is bounded also where a fetch brings many steps; rows are never shown with another step's tensors."""
    specs = dense_specs(shapes={"fc.weight": ((3000, 1000), DType.FLOAT32)})
    logs = begun(specs=specs)
    logs.publish(1)
    logs.take()
    for step in range(2, 13):
        logs.publish(step)
    logs.take(0)
    assert logs.copy.dense.size_bytes < 10 * memory_of_dense(specs) / 2 + (1 << 20)
    updates, logs.updates[1] = logs.updates[1], []
    shown = []
    for seq, update in enumerate(updates, logs.copy.tails[1].seq + 1):
        logs.copy.take(1, [update], seq)
        assert logs.shown == logs.copy.visible and logs.shown_rows == logs.copy.visible[1]
        shown.append(logs.copy.visible[1])
    assert shown == [1, 1, 1, 5, 6, 7, 8, 9, 10, 11, 12]


def test_a_dense_tensor_is_no_table() -> None:
    """A lookup names `dense`; an unknown model, or none of several, is refused."""
    logs = begun()
    logs.take()
    assert logs.copy.tables.keys() == {TABLE.fqn}
    for name in ("fc.bias", "ctr:fc.bias"):
        with pytest.raises(RequestError, match=r"'ctr:fc.bias' is a dense tensor and no table: read it with dense\(\)"):
            logs.copy.table(name)
    with pytest.raises(UnknownTableError, match="model 'cvr' has no dense tensors here"):
        logs.copy.dense.part("cvr")
    with pytest.raises(UnavailableError, match=r"no whole dense part of model 'ctr' yet \(no rows have come\)"):
        logs.copy.dense.part(None)
    logs.write(0, 3, "first")
    logs.take()
    with pytest.raises(UnavailableError, match="step 3 of epoch 1 lacks rows of 4 of 4 tensors"):
        logs.copy.dense.part(None)


def test_rows_in_part_are_refused() -> None:
    """A record that deletes rows of a dense tensor cannot be applied: a part could never be whole."""
    logs = begun(num_shards=1)
    delta = dense_delta(SPECS[0], 1, [0])
    delta.deleted_row_ids = torch.tensor([1]).numpy()
    logs.send(0, request_of(delta))
    with pytest.raises(CorruptionError, match="its rows have all columns, and none is deleted"):
        logs.take()
