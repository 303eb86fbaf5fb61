"""Which dense part a copy shows when: never mixed, never older, by step with its cut; without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dense_trainer import dense_delta, dense_specs, table_spec, tensor_of
from set_embeddings import request_of

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

    def __init__(self, *, is_by_step: bool = True, num_shards: int = 2, specs: list[TableSpec] = SPECS) -> None:
        self.specs = specs
        self.updates: list[list[Update]] = [[] for _ in range(num_shards)]
        self._seqs = [0] * num_shards
        self._client_seqs: dict[tuple[int, str], int] = {}
        tails = [ShardTail(shard, seq=0, catalog=Catalog({}), sessions=Sessions({})) for shard in range(num_shards)]
        self.copy = TableSet("s", tails, is_by_step=is_by_step, make_table=MemoryTable)

    @classmethod
    def of_a_run(cls, **settings: Any) -> Logs:
        """Return logs of which the copy has the trainer's hello."""
        logs = cls(**settings)
        logs.hello()
        logs.take()
        return logs

    def hello(self, *, epoch: int = 1, client: str = "rank0", **changes: Any) -> None:
        names = [TABLE, *self.specs]
        for shard in range(len(self.updates)):
            header = {
                "run": "run",
                "client": client,
                "rank": 0,
                "world_size": 1,
                "tables": [pack_spec(spec) for spec in names],
                "owned": [spec.fqn for spec in names],
                **changes,
            }
            self._client_seqs[shard, client] = 0
            self._append(shard, epoch, idl.UpdateKind.HELLO, header, b"")

    def publish(self, step: int, *, shard: int | None = None, **changes: Any) -> None:
        """Write all rows of a step, and end it."""
        for each in range(len(self.updates)) if shard is None else [shard]:
            self.write(each, step, [TABLE, *self.specs], **({"ends_step": True} | changes))

    def write(
        self, shard: int, step: int, specs: list[TableSpec], *, ends_step: bool = False, epoch: int = 1, **changes: Any
    ) -> None:
        deltas = []
        for spec in specs:
            ids = shards_of_rows(table_seed(spec.fqn), torch.arange(spec.num_rows).numpy(), len(self.updates))
            deltas.append(dense_delta(spec, step, (ids == shard).nonzero()[0]))
        client = changes.get("client", "rank0")
        self._client_seqs[shard, client] += 1
        fields: dict[str, Any] = {"time_us": step * 1000, "step": step, "epoch": epoch}
        request = request_of(
            *deltas, client_seq=self._client_seqs[shard, client], ends_step=ends_step, **(fields | changes)
        )
        body = b"".join(encode_message("setEmbeddings", CALL, 1, idl.ParameterServer.setEmbeddings_args(request)))
        self._append(shard, epoch, idl.UpdateKind.BATCH, {}, body)

    def _append(self, shard: int, epoch: int, kind: int, header: dict[str, Any], body: bytes) -> None:
        self._seqs[shard] += 1
        self.updates[shard].append(Update(self._seqs[shard], epoch, kind, header, memoryview(body)))

    def take(self, *shards: int) -> None:
        """Let the copy take what some shards have, all without any."""
        for shard in shards or range(len(self.updates)):
            updates, self.updates[shard] = self.updates[shard], []
            self.copy.take(shard, updates, self._seqs[shard])

    @property
    def shown(self) -> tuple[int, int] | None:
        """Version of the visible part, whose every element is checked; None before the first."""
        try:
            part = self.copy.dense.part("ctr")
        except UnavailableError:
            return None
        assert part.tensors.keys() == {path_of(spec.fqn) for spec in self.specs}
        for spec in self.specs:
            assert torch.equal(as_tensor(part, path_of(spec.fqn)), tensor_of(spec, part.step)), spec.fqn
        return part.version

    @property
    def shown_rows(self) -> float:
        """The step that the table's rows tell."""
        rows = np.unique(self.copy.table("user.weight").gather(np.arange(TABLE.num_rows))[0])
        assert rows.size == 1
        return float(rows[0])


def test_a_part_is_shown_with_its_cut() -> None:
    """By step, rows and dense tensors change together, once all shards have ended the step."""
    logs = Logs.of_a_run()
    assert logs.shown is None
    logs.publish(1)
    logs.take(0)
    assert logs.shown is None
    logs.take(1)
    assert (logs.shown, logs.copy.visible, logs.shown_rows) == ((1, 1), (1, 1), 1.0)
    logs.publish(2, ends_step=False)
    logs.take()
    assert (logs.shown, logs.shown_rows) == ((1, 1), 1.0)
    for shard in range(2):
        logs.write(shard, 2, [], ends_step=True)
    logs.take()
    assert (logs.shown, logs.copy.visible, logs.shown_rows) == ((1, 2), (1, 2), 2.0)


def test_latest_shows_a_part_as_soon_as_it_is_whole() -> None:
    """Without steps, the newest whole part is shown, and repeated rows of an older one change nothing."""
    logs = Logs.of_a_run(is_by_step=False)
    logs.publish(3, ends_step=False)
    logs.publish(5, shard=0, ends_step=False)
    logs.take()
    assert logs.shown == (1, 3)
    logs.publish(3, ends_step=False)
    logs.take()
    assert logs.shown == (1, 3)
    logs.publish(5, shard=1, ends_step=False)
    logs.take()
    assert logs.shown == (1, 5)


@pytest.mark.parametrize("is_by_step", [False, True])
def test_a_trainer_that_dies_within_a_step_leaves_the_old_part(is_by_step: bool) -> None:
    """Rows of the step that never ended are mixed with no others; the next run's part replaces the old one."""
    logs = Logs.of_a_run(is_by_step=is_by_step)
    logs.publish(1)
    logs.write(0, 2, SPECS)
    logs.take()
    assert logs.shown == (1, 1)
    logs.hello(epoch=2)
    logs.take()
    assert logs.shown == (1, 1)
    logs.publish(2, shard=0, epoch=2)
    logs.take()
    assert logs.shown == (1, 1)
    logs.publish(2, shard=1, epoch=2)
    logs.take()
    assert logs.shown == (2, 2)


def test_a_trainer_that_publishes_no_dense_tensors_keeps_the_part() -> None:
    """Its cuts become visible, and the newest part that is not newer than them stays."""
    logs = Logs.of_a_run()
    logs.publish(1)
    for shard in range(2):
        logs.write(shard, 2, [TABLE], ends_step=True)
    logs.take()
    assert (logs.copy.visible, logs.shown_rows, logs.shown) == ((1, 2), 2.0, (1, 1))


def test_each_tensor_comes_from_one_rank() -> None:
    """A part has tensors of several ranks, and is shown when all of them have ended the step."""
    logs = Logs.of_a_run()
    for rank in range(2):
        logs.hello(client=f"rank{rank}", rank=rank, world_size=2)
    for rank, specs in enumerate(([TABLE, SPECS[0]], SPECS[1:])):
        for shard in range(2):
            logs.write(shard, 1, specs, ends_step=True, client=f"rank{rank}")
        logs.take()
        assert logs.shown == (None, (1, 1))[rank]


def test_another_architecture_replaces_the_part() -> None:
    """Tensors that only the older run had are left behind; the old part stays until the new one is whole."""
    logs = Logs.of_a_run()
    logs.publish(1)
    logs.take()
    logs.specs = dense_specs(shapes={"fc.bias": ((50,), DType.BFLOAT16), "out.weight": ((1, 50), DType.FLOAT32)})
    logs.hello(epoch=2)
    logs.take()
    assert logs.copy.dense.part("ctr").version == (1, 1)
    logs.publish(1, epoch=2)
    logs.take()
    assert logs.shown == (2, 1)


def test_rows_out_of_order_count_only_if_newer() -> None:
    """Replayed rows make a part if they are newer than the visible one."""
    logs = Logs.of_a_run(is_by_step=False)
    logs.publish(5)
    logs.take()
    for step, shown in ((4, 5), (6, 6)):
        logs.publish(step, ends_step=False, version_epoch=1)
        logs.take()
        assert logs.shown == (1, shown)


def test_replayed_parts_are_shown_before_any_run() -> None:
    """By step, a server that only gets replays shows their newest whole part."""
    logs = Logs()
    logs.hello(epoch=9, run="replay", client="replay", world_size=0, owned=[])
    logs.publish(7, ends_step=False, epoch=9, version_epoch=1, run="replay", client="replay")
    logs.take()
    assert (logs.shown, logs.copy.visible) == ((1, 7), (0, -1))


def test_a_shard_may_not_be_many_dense_steps_ahead() -> None:
    """It waits for the one behind, which never waits; each part is shown with its cut when that catches up."""
    logs = Logs.of_a_run()
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
    logs = Logs.of_a_run(is_by_step=False)
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
    logs = Logs.of_a_run(specs=specs)
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
    logs = Logs.of_a_run()
    logs.take()
    assert logs.copy.tables.keys() == {TABLE.fqn}
    for name in ("fc.bias", "ctr:fc.bias"):
        with pytest.raises(RequestError, match=r"'ctr:fc.bias' is a dense tensor and no table: read it with dense\(\)"):
            logs.copy.table(name)
    with pytest.raises(UnknownTableError, match="model 'cvr' has no dense tensors here"):
        logs.copy.dense.part("cvr")
    with pytest.raises(UnavailableError, match=r"no whole dense part of model 'ctr' yet \(no rows have come\)"):
        logs.copy.dense.part(None)
    logs.write(0, 3, SPECS[:1])
    logs.take()
    with pytest.raises(UnavailableError, match="step 3 of epoch 1 lacks rows of 4 of 4 tensors"):
        logs.copy.dense.part(None)


def test_rows_in_part_are_refused() -> None:
    """A record that deletes rows of a dense tensor cannot be applied: a part could never be whole."""
    logs = Logs.of_a_run(num_shards=1)
    delta = dense_delta(SPECS[0], 1, [0])
    delta.deleted_row_ids = torch.tensor([1]).numpy()
    body = b"".join(encode_message("setEmbeddings", CALL, 1, idl.ParameterServer.setEmbeddings_args(request_of(delta))))
    logs._append(0, 1, idl.UpdateKind.BATCH, {}, body)
    with pytest.raises(CorruptionError, match="its rows have all columns, and none is deleted"):
        logs.take()
