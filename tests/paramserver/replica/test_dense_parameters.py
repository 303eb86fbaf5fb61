"""Dense parameters through a server: replicas and readers get parts of one step, wherever they begin."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from counted_training import make_snapshot
from dense_trainer import DenseTrainer, dense_specs, tensor_of
from loop_clock import ClockAhead
from watched_server import wait_until

from headrace.paramserver.reading.dense_parts import DenseAssemblies, DensePart
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica import DiskStorage, EmbeddingReplica
from headrace.paramserver.replica.api.embedding_replica import as_tensor
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import RequestError, UnavailableError, UnknownTableError
from headrace.schemas.tables import DType

WAIT_S = 60.0
# None of it may apply to dense tensors.
SETTINGS = {"precision": "int8", "storage": {"*": DiskStorage(memory_bytes=1 << 20)}}


def assert_part(replica: EmbeddingReplica, trainer: DenseTrainer, step: int, *, model: str | None = None) -> None:
    part = replica.dense(model)
    assert (part.epoch, part.step) == (trainer.epoch, step)
    expected = trainer.tensors(step)
    assert part.tensors.keys() == expected.keys()
    for path, tensor in expected.items():
        assert part.tensors[path].dtype is tensor.dtype and torch.equal(part.tensors[path], tensor), path


def read(own_server: ServerProcess, **options: object) -> DensePart:
    async def read() -> DensePart:
        async with await EmbeddingReader.connect(own_server.address) as reader:
            return await reader.dense(**options)

    return asyncio.run(read())


def read_once(own_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> DensePart:
    """Read with a deadline that passes as soon as all rows have been read once."""

    async def read() -> DensePart:
        async with await EmbeddingReader.connect(own_server.address) as reader:
            clock, fill = ClockAhead(monkeypatch), reader._fill

            async def fill_and_pass(*args: Any) -> None:
                await fill(*args)
                clock.ahead_s += 2 * WAIT_S

            monkeypatch.setattr(reader, "_fill", fill_and_pass)
            return await reader.dense(timeout_s=WAIT_S)

    return asyncio.run(read())


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_a_replica_follows_the_dense_tensors(own_server: ServerProcess, consistency: str) -> None:
    """A part is that of the rows by step; a replica that begins later has it from the start."""
    with DenseTrainer(own_server.address) as trainer:
        trainer.publish(1)
        with EmbeddingReplica(own_server.address, consistency=consistency, **SETTINGS) as replica:
            for step in (1, 5, 9):
                trainer.publish(step)
                replica.wait_for(step, WAIT_S)
                wait_until(lambda step=step: replica.dense().step == step, "the part")
                assert_part(replica, trainer, step)
                assert (replica.dense().row_epoch, replica.dense().row_step) == (1, step)
            assert replica.tables.keys() == {"ctr:user.weight"}
            with pytest.raises(RequestError, match="is a dense tensor and no table: read it with dense"):
                replica.lookup("fc.weight", [0])
            replica.dense().tensors["fc.weight"].zero_()
            assert_part(replica, trainer, 9)
            with EmbeddingReplica(own_server.address, consistency=consistency, **SETTINGS) as later:
                assert_part(later, trainer, 9)


def test_a_part_and_rows_are_of_one_moment(own_server: ServerProcess) -> None:
    """By step, `dense` and lookups within one moment never differ, however fast steps come."""
    with DenseTrainer(own_server.address) as trainer:
        trainer.publish(1)
        faults: list[object] = []
        seen: set[int] = set()
        is_over = threading.Event()
        with EmbeddingReplica(own_server.address, consistency="step") as replica:

            def look() -> tuple[int, int, float]:
                rows = replica.lookup("user.weight", range(20)).unique()
                part = replica.dense()
                value = tensor_of(trainer.specs[0], part.step)
                return part.step, part.row_step, float(rows) if torch.equal(part.tensors["fc.weight"], value) else -1.0

            def check() -> None:
                while not is_over.is_set():
                    step, row_step, rows = replica.at_one_moment(look)
                    seen.add(step)
                    if not step == row_step == rows:
                        faults.append((step, row_step, rows))

            thread = threading.Thread(target=check)
            thread.start()
            try:
                for step in range(2, 60):
                    trainer.publish(step)
                    if step < 5:  # later ones may be over before anybody looks
                        wait_until(lambda step=step: step in seen, "a look at the step")
                replica.wait_for(59, WAIT_S)
                wait_until(lambda: 59 in seen, "a look at the last step")
            finally:
                is_over.set()
                thread.join()
        assert not faults


def test_a_trainer_killed_within_a_dense_step(own_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas keep the old part, a snapshot's too; one that reads the mixed rows has none, and says why."""
    with DenseTrainer(own_server.address) as trainer:
        trainer.publish(1)
        snapshot = make_snapshot(own_server)
        with EmbeddingReplica(own_server.address) as replica:
            trainer.send(0, 2, [*trainer.tables, *trainer.specs])
            trainer.close()
            assert_part(replica, trainer, 1)
            replica.load_snapshot(snapshot)
            assert_part(replica, trainer, 1)
            with EmbeddingReplica(own_server.address, snapshot=snapshot) as restarted:
                assert_part(restarted, trainer, 1)
            with EmbeddingReplica(own_server.address) as mixed:
                with pytest.raises(
                    UnavailableError, match=r"no whole dense part of model 'ctr' yet.*step 2 of epoch 1"
                ):
                    mixed.dense()
                with pytest.raises(UnavailableError, match=r"were not of one step within .*: step 1 of epoch 1 lacks"):
                    read_once(own_server, monkeypatch)
                with DenseTrainer(own_server.address, epoch=2) as again:
                    again.publish(2)
                    for each in (mixed, replica):
                        each.wait_for(2, WAIT_S, epoch=2)
                        assert_part(each, again, 2)


def test_a_rebuilt_copy_keeps_the_part_of_a_dead_trainer(own_server: ServerProcess) -> None:
    """A new copy read from rows of two steps goes on with the old copy's part."""
    with DenseTrainer(own_server.address) as trainer, EmbeddingReplica(own_server.address) as replica:
        trainer.publish(1)
        wait_until(lambda: replica.step == 1, "the step")
        trainer.send(0, 2, trainer.specs)
        assert_part(replica, trainer, 1)
        replica._switch(None, timeout_s=WAIT_S)
        assert_part(replica, trainer, 1)
        trainer.send(1, 2, trainer.specs)
        wait_until(lambda: replica.dense().step == 2, "the rest of the part")
        assert_part(replica, trainer, 2)


def test_two_models(own_server: ServerProcess) -> None:
    """Each model has parts of its own; without a name only one may have some."""
    others = dense_specs("cvr", shapes={"fc.weight": ((7, 3), DType.FLOAT16)})
    with (
        DenseTrainer(own_server.address) as ctr,
        DenseTrainer(own_server.address, model="cvr", run="cvr", epoch=2, specs=others) as cvr,
    ):
        for step in (1, 5):
            cvr.publish(step)
        ctr.publish(1)
        check_two_models(own_server, ctr, cvr)


def check_two_models(own_server: ServerProcess, ctr: DenseTrainer, cvr: DenseTrainer) -> None:
    with (
        EmbeddingReplica(own_server.address) as both,
        EmbeddingReplica(own_server.address, model="cvr", consistency="step") as one,
    ):
        assert_part(both, ctr, 1, model="ctr")
        assert_part(both, cvr, 5, model="cvr")
        assert_part(one, cvr, 5)
        with pytest.raises(RequestError, match=r"several models have dense tensors \(ctr, cvr\): name one"):
            both.dense()
        with pytest.raises(UnknownTableError, match="model 'ctr' has no dense tensors here"):
            one.dense("ctr")
        with pytest.raises(RequestError, match=r"several models have dense tensors"):
            read(own_server)
        assert read(own_server, model="cvr").step == 5


def test_a_run_with_another_architecture(own_server: ServerProcess) -> None:
    """Its part has its own tensors only, also for replicas and readers that find rows of both."""
    specs = dense_specs(shapes={"fc.bias": ((50,), DType.BFLOAT16), "out.weight": ((1, 50), DType.FLOAT32)})
    with DenseTrainer(own_server.address) as first:
        first.publish(7)
    with EmbeddingReplica(own_server.address, consistency="step") as replica:
        assert_part(replica, first, 7)
        with DenseTrainer(own_server.address, run="other", epoch=2, specs=specs, takes_over=True) as second:
            second.publish(1)
            replica.wait_for(1, WAIT_S, epoch=2)
            assert_part(replica, second, 1)
            with EmbeddingReplica(own_server.address, consistency="step") as later:
                assert_part(later, second, 1)
            assert read(own_server).tensors.keys() == second.tensors(1).keys()


def test_a_replica_of_some_tables(own_server: ServerProcess) -> None:
    """The part has the dense tensors that `tables` names; without any there is none."""
    with DenseTrainer(own_server.address) as trainer:
        trainer.publish(1)
        with EmbeddingReplica(own_server.address, tables={"user.weight", "fc.bias"}) as replica:
            assert replica.dense().tensors.keys() == {"fc.bias"}
        with (
            EmbeddingReplica(own_server.address, tables={"user.weight"}) as replica,
            pytest.raises(UnknownTableError, match="no model has dense tensors here"),
        ):
            replica.dense()


def test_a_reader_gets_one_step(own_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads again until all rows are of one step, with the optimizer's states if they are wanted."""
    specs = dense_specs(state="exp_avg")
    with DenseTrainer(own_server.address, specs=specs) as trainer:
        with pytest.raises(UnavailableError, match="no rows have come"):
            read(own_server, timeout_s=0.2)
        trainer.publish(1)
        part = read(own_server, with_states=True)
        assert (part.epoch, part.step) == (1, 1)
        for path, tensor in trainer.tensors(1).items():
            assert torch.equal(as_tensor(part, path), tensor)
            assert part.states[path].keys() == {"exp_avg"}
            assert np.array_equal(part.states[path]["exp_avg"], np.full(tensor.shape, 1.0, np.float32))
        trainer.send(0, 2, specs)
        begun: list[asyncio.Event] = []
        whole = DenseAssemblies.whole

        def told(*args: Any, **options: Any) -> DensePart | None:
            for event in begun:
                event.set()
            return whole(*args, **options)

        monkeypatch.setattr(DenseAssemblies, "whole", told)

        async def read_while_written() -> DensePart:
            begun.append(asyncio.Event())
            async with await EmbeddingReader.connect(own_server.address) as reader:
                reading = asyncio.create_task(reader.dense(timeout_s=WAIT_S))
                await begun[0].wait()
                await asyncio.to_thread(trainer.send, 1, 2, specs)
                return await reading

        assert asyncio.run(read_while_written()).step == 2
