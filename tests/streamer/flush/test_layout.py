"""What a flush sends: messages, their order, their sizes, their marks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from trainer_tables import POINTWISE, ROWWISE, WRITER, Submitted, Trained, rows_of

from headrace.schemas.errors import InvariantError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message, size_of_segments
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import ColumnShard, DType
from headrace.streamer.flush.layout import Column, Flush, Message


def flush_of(tables: list[Trained], num_shards: int, step: int = 3) -> Flush:
    submitted = Submitted(tables, num_shards=num_shards)
    submitted.flusher.on_step(step)
    (flush,) = submitted.flushes
    return flush


def request_of(message: Message) -> object:
    return idl.ParameterServer.setEmbeddings_args(
        request=idl.SetEmbeddingsRequest(
            run=WRITER.run,
            client=WRITER.client,
            epoch=1,
            client_seq=1,
            step=message.step,
            time_us=message.time_us,
            ends_step=message.ends_step,
            is_exact_cut=message.is_exact_cut,
            deltas=message.deltas,
        )
    )


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("max_bytes", [600, 2**20])
def test_messages_carry_each_row_once_to_its_shard(num_shards: int, max_bytes: int) -> None:
    """Weights and states of every dirty row, and of no other, reach the shard that the routing names."""
    tables = [
        Trained("a.weight", 40, 4, states=(POINTWISE, ROWWISE), row_offset=100, seed=1),
        Trained("b.weight", 9, 3, dtype=DType.BFLOAT16, states=(ROWWISE,), seed=2),
        Trained("c.weight", 30, 8, dtype=DType.FLOAT16, shard=ColumnShard(offset=2, width=5), seed=3),
    ]
    expected = set()
    for table in tables:
        local = list(range(0, table.tapped.num_local_rows, 2))
        table.mark(local)
        spec = table.tapped.spec
        ids = torch.tensor(local).numpy() + table.tapped.row_offset
        shards = shards_of_rows(table_seed(spec.fqn), ids, num_shards)
        for row, shard, at in zip(ids.tolist(), shards.tolist(), local, strict=True):
            columns = [table.weights.detach(), *table.states.values()]
            data = b"".join(column[at].view(torch.uint8).numpy().tobytes() for column in columns)
            expected.add((shard, spec.fqn, row, data))
    rows = rows_of(flush_of(tables, num_shards), num_shards, max_bytes=max_bytes)
    assert len(rows) == len(set(rows))
    assert set(rows) == expected


def test_delta_describes_its_columns() -> None:
    """A delta names table, fingerprint, columns and states as the server checks them."""
    table = Trained("a.weight", 5, 8, states=(POINTWISE, ROWWISE), shard=ColumnShard(offset=4, width=4))
    table.mark([1, 3])
    (message,) = flush_of([table], 1).messages(0, 2**20)
    (delta,) = message.deltas
    assert (delta.fqn, delta.fingerprint) == ("a.weight", table.tapped.spec.fingerprint)
    assert (delta.column_offset, delta.width) == (4, 4)
    assert [(s.name, s.dtype, s.width, len(s.data)) for s in delta.states] == [
        ("exp_avg", DType.FLOAT32, 4, 32),
        ("momentum1", DType.FLOAT32, 1, 8),
    ]


@pytest.mark.parametrize("max_bytes", [700, 2000, 2**20])
def test_size_is_a_bound_on_the_encoded_message(max_bytes: int) -> None:
    """`size_bytes` with the names is never less than the bytes on the wire, and little more for a large message."""
    tables = [Trained(f"table-with-a-long-name-{i}.weight", 60, 4 + i, states=(POINTWISE, ROWWISE)) for i in range(5)]
    for table in tables:
        table.mark(range(60))
    for message in flush_of(tables, 1).messages(0, max_bytes):
        names = len(WRITER.run) + len(WRITER.client)
        size_bytes = size_of_segments(encode_message("setEmbeddings", CALL, 1, request_of(message)))
        assert size_bytes <= message.size_bytes + names <= size_bytes + 200 + 250 * len(message.deltas)
        assert message.size_bytes <= max_bytes


def test_columns_are_views_of_the_staging_buffer() -> None:
    """Nothing is copied between the gather and the wire, and every column is aligned."""
    table = Trained("a.weight", 50, 4, states=(ROWWISE,))
    table.mark(range(50))
    flush = flush_of([table], 2)
    assert flush.staging is not None
    buffer = torch.frombuffer(flush.staging.used(), dtype=torch.uint8)
    for column in flush.tables[0].columns:
        start = torch.frombuffer(column.data, dtype=torch.uint8).data_ptr()
        assert 0 <= start - buffer.data_ptr() < buffer.numel()
        assert start % 64 == 0
    for message in flush.messages(0, 600):
        for delta in message.deltas:
            assert memoryview(delta.weights).obj is flush.staging.used().obj


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("fault", ["id", "bounds", "columns"])
def test_rows_that_are_not_those_of_the_flush_are_not_sent(num_shards: int, fault: str) -> None:
    """A buffer that was overwritten, rows cut wrong, and columns of other rows end it with an error, and send none."""
    table = Trained("a.weight", 40, 4, row_offset=100)
    table.mark(range(2, 40))
    flush = flush_of([table], num_shards)
    (taken,) = flush.tables
    if fault == "id":
        taken.row_ids.data[0] ^= 1
    elif fault == "bounds":
        flush.tables = [dataclasses.replace(taken, bounds=[taken.bounds[0] + 1, *taken.bounds[1:]])]
    else:
        ids = Column(taken.row_ids.data[8:], 8)
        flush.tables = [dataclasses.replace(taken, row_ids=ids)]
    sent = []
    with pytest.raises(InvariantError, match=r"^step 3, flush → messages to shard 0, table 'a.weight': "):
        sent += flush.messages(0, 600)
    assert sent == []
