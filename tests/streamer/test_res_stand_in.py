"""The stand-in for FBGEMM's RES streamer, called as a table-batched module calls it, on CPU tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fake_shard import WAIT_S, FakeStore, hosted

from headrace.paramserver.reading.follower import ShardFollower
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, RequestError, RowRangeError, UnsupportedModelError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.streamer import RawEmbeddingStreamer, install
from headrace.streamer.compare import compare_with_store
from headrace.streamer.res_stand_in import provide_masked_index_select
from headrace.streamer.taps.tapped_table import TablePart

ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")

FAST: dict[str, Any] = {"flush_percent": 100, "connect_timeout_s": WAIT_S, "flush_timeout_s": WAIT_S}


def make_module(specs: list[tuple[int, int]], **res: Any) -> Any:
    return ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU) for rows, dim in specs],
        enable_raw_embedding_streaming=True,
        res_params=ops.RESParams(**res),
    )


@pytest.fixture
def store() -> Iterator[FakeStore]:
    with hosted(FakeStore(num_shards=2)) as store:
        yield store


@pytest.fixture
def streamer(store: FakeStore) -> Iterator[RawEmbeddingStreamer]:
    streamer = RawEmbeddingStreamer(store.address, run="res", **FAST)
    yield streamer
    streamer.close(flush=False)


def call(module: Any, indices: list[int], weights: torch.Tensor, *, count: int | None = None, **more: Any) -> Any:
    """Call it as `raw_embedding_stream` of fbgemm-gpu 1.8.0 does: buffers longer than what is valid, then flags."""
    padding = 3
    buffer = torch.cat([torch.tensor(indices, dtype=torch.int64), torch.full((padding,), 1)])
    values = torch.cat([weights, torch.full((padding, weights.shape[1]), torch.nan)])
    flag = torch.ones(1, dtype=torch.int32)
    module._raw_embedding_streamer.join_stream_tensor_copy_thread()
    module._raw_embedding_streamer.stream(
        buffer,
        values,
        more.get("identities"),
        more.get("runtime_meta"),
        torch.tensor([len(indices) if count is None else count], dtype=torch.int32),
        True,
        False,
        flag,
    )
    return flag


def test_the_operator_that_public_builds_lack() -> None:
    """Rows at valid indices are copied; what stands behind the count, or at negative indices, is not even read."""
    provide_masked_index_select()
    provide_masked_index_select()
    values = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    out = torch.full((7, 2), -1.0)
    indices = torch.tensor([5, -1, 0, 3, 2**30, -(2**30)], dtype=torch.int32)
    torch.ops.fbgemm.masked_index_select(out, indices, values, torch.tensor([4], dtype=torch.int32))
    assert out.tolist() == [[10, 11], [-1, -1], [0, 1], [6, 7], [-1, -1], [-1, -1], [-1, -1]]


def test_rows_reach_the_store(store: FakeStore, streamer: RawEmbeddingStreamer) -> None:
    """Valid rows arrive under their global ids; negative ones (of uncached tables) and those after `count` do not."""
    module = make_module([(10, 8), (0, 4), (20, 4)], table_names=["a", "empty", "b"], table_offsets=[0, 0, 100])
    assert install(module, streamer, path="m") is streamer
    assert [(t.spec.fqn, t.row_offset, t.spec.dim) for t in streamer.tables] == [
        ("m.a", 0, 8),
        ("m.b", 100, 4),
    ]
    before = [table.clone() for table in module.split_embedding_weights()]
    values = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    flag = call(module, [9, -1, 10, 29, -1, 3], values, count=5)
    assert int(flag) == 0
    streamer.flush()
    a, _, b = module.split_embedding_weights()
    assert torch.equal(a[9], values[0])
    assert torch.equal(b[[0, 19]], values[[2, 3], :4])
    assert torch.equal(a[3], before[0][3])
    result = compare_with_store(streamer.tables, store.address, only_present=True, timeout_s=WAIT_S)
    assert result.is_equal
    assert [(t.num_equal, t.num_missing) for t in result.tables] == [(1, 9), (2, 18)]
    rows = streamer.fetch("m.b", torch.tensor([100, 119]))
    assert torch.equal(rows.weights, values[[2, 3], :4])


def test_many_tables(store: FakeStore, streamer: RawEmbeddingStreamer) -> None:
    """Table 200 is not truncated to eight bits."""
    names = [f"t{i}" for i in range(201)]
    module = make_module([(2, 4)] * 201, table_names=names, table_offsets=[0] * 201)
    install(module, streamer)
    call(module, [401], torch.full((1, 4), 7.0))
    streamer.flush()
    result = compare_with_store(streamer.tables, store.address, only_present=True, timeout_s=WAIT_S)
    assert [t.fqn for t in result.tables if t.num_equal] == ["t200"]
    assert result.num_compared == 1


def test_steps_of_several_modules(streamer: RawEmbeddingStreamer) -> None:
    """A step is over when a module streams for the second time, whatever the others do; late rows have their values."""
    first, second = (make_module([(8, 4)], table_names=[name], table_offsets=[0]) for name in "ab")
    install(first, streamer)
    install(second, streamer)
    for step in range(3):
        call(first, [step], torch.full((1, 4), float(step)))
        call(second, [step], torch.full((1, 4), float(step)))
    assert streamer.stats().step == 2
    streamer.flush()
    assert streamer.stats().step >= 3
    assert streamer.stats().acked_step == streamer.stats().step


def test_identities_without_the_setting_are_said_not_to_be_streamed(
    streamer: RawEmbeddingStreamer, caplog: pytest.LogCaptureFixture
) -> None:
    """Identities that `install` was not told of are taken, and one line says what to do."""
    module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
    install(module, streamer)
    for _ in range(2):
        call(module, [2], torch.ones(1, 4), identities=torch.zeros(4, 1, dtype=torch.int64))
    assert caplog.text.count("has_identities=True") == 1
    assert streamer.stats().num_dirty_rows + streamer.stats().num_inflight_flushes >= 1


def read_store(address: str, fqn: str, row_ids: list[int]) -> tuple[Rows, dict[int, list[bytes]]]:
    """Return rows, and by row all the runtime meta that the log has of it, in order."""

    async def read() -> tuple[Rows, dict[int, list[bytes]]]:
        metas: dict[int, list[bytes]] = {}
        async with await EmbeddingReader.connect(address, timeout_s=WAIT_S) as reader:
            rows = await reader.get(fqn, np.array(row_ids))
            for link in reader.links:
                follower = ShardFollower(link, from_seq=1, wait_s=0)
                while updates := await follower.fetch():
                    for update in updates:
                        if update.kind == idl.UpdateKind.BATCH:
                            _add_metas(metas, update.body, fqn)
        return rows, metas

    return asyncio.run(read())


def _add_metas(metas: dict[int, list[bytes]], body: memoryview, fqn: str) -> None:
    request = decode_struct(idl.ParameterServer.setEmbeddings_args, body, decode_header(body).body_offset).request
    for delta in request.deltas:
        ids = np.frombuffer(delta.row_ids, "<i8").tolist()
        meta = bytes(delta.runtime_meta or b"")
        for at, row in enumerate(ids if delta.fqn == fqn else ()):
            width = len(meta) // len(ids)
            metas.setdefault(row, []).append(meta[at * width : (at + 1) * width])


def test_identities_and_runtime_meta_are_streamed(server: ServerProcess) -> None:
    """The store has each row's identity; its log has each row's meta, whose shape and type may change amid a step."""
    module = make_module([(8, 4), (6, 4), (9, 4)], table_names=["a", "uncached", "b"], table_offsets=[0, 0, 2**41])
    parts = [
        TablePart(fqn="a", num_rows=8, dim=4),
        TablePart(fqn="uncached", num_rows=6, dim=4),
        TablePart(fqn="b", num_rows=0, dim=4, row_offset=2**41),
    ]
    with RawEmbeddingStreamer(server.address, run="res-extras", **FAST) as streamer:
        streamer.pause()  # one flush, in which rows of both shapes of meta are together
        install(module, streamer, parts=parts, has_identities=True)
        raw_ids = torch.tensor([2**45 + 3, 0, 14, 2**45 + 8, 5, 1, 1, 1])
        meta = torch.arange(16, dtype=torch.int32).reshape(8, 2)
        values = torch.arange(20, dtype=torch.float32).reshape(5, 4)
        # Row 3 of a, a miss, rows 0 and 8 of b, and one that is beyond the count.
        call(module, [3, -1, 14, 22, 5], values, count=4, identities=raw_ids, runtime_meta=meta)
        call(module, [14, 0], values[:2] + 50, identities=raw_ids.reshape(-1, 1), runtime_meta=meta[:, :1].double())
        call(module, [1], values[:1], runtime_meta=None)
        streamer.flush()
        result = compare_with_store(streamer.tables, server.address, only_present=True, timeout_s=WAIT_S)
        assert result.is_equal, str(result)
        assert [(table.fqn, table.num_equal) for table in result.tables] == [("a", 3), ("uncached", 0), ("b", 2)]
        b, metas = read_store(server.address, "b", [2**41, 2**41 + 8, 2**41 + 1])
        assert b.identities is not None
        assert b.presence.tolist() == [1, 1, 0]
        assert b.identities[:2].tolist() == [2**45 + 3, 2**45 + 8]
        assert np.array_equal(b.weights[:2], torch.stack([values[0] + 50, values[3]]).numpy())
        assert metas == {
            2**41: [meta[:1, :1].double().numpy().tobytes()],
            2**41 + 8: [meta[3].numpy().tobytes()],
        }
        a, metas = read_store(server.address, "a", [3, 0, 1])
        assert a.identities is not None
        assert a.identities.tolist() == [2**45 + 3, 0, -1]
        assert metas == {3: [meta[0].numpy().tobytes()], 0: [meta[1:2, :1].double().numpy().tobytes()], 1: [b""]}
        with pytest.raises(RequestError, match="runtime meta of 8000 bytes a row"):
            call(module, [2], values[:1], runtime_meta=torch.zeros(4, 1000, dtype=torch.int64))
        with pytest.raises(RequestError, match=r"identities of shape \(4, 2\)"):
            call(module, [2], values[:1], identities=torch.zeros(4, 2, dtype=torch.int64))
        assert streamer.stats().num_dirty_rows == 0


def test_enabled_tables(store: FakeStore, streamer: RawEmbeddingStreamer) -> None:
    """Only tables of the allow-list are streamed; one that names none of them is an error."""
    module = make_module([(8, 4), (8, 4)], table_names=["a", "b"], table_offsets=[0, 0])
    with pytest.raises(ConfigError, match="none of the tables m\\.a, m\\.b"):
        install(module, streamer, path="m", enabled_tables="x,y")
    install(module, streamer, path="m", enabled_tables="x, b")
    assert [table.spec.fqn for table in streamer.tables] == ["m.b"]
    before = module.split_embedding_weights()[0].clone()
    call(module, [1, 9], torch.ones(2, 4))
    assert torch.equal(module.split_embedding_weights()[0], before)
    streamer.flush()
    assert compare_with_store(streamer.tables, store.address, only_present=True).num_compared == 1


def test_column_shards_are_kept_apart(store: FakeStore, streamer: RawEmbeddingStreamer) -> None:
    """Two column shards of one table, which RES mixes up, arrive in their own columns."""
    module = make_module([(8, 4), (8, 4)], table_names=["a", "a"], table_offsets=[0, 0])
    parts = [TablePart(fqn="a", num_rows=8, dim=8, column_offset=offset) for offset in (0, 4)]
    install(module, streamer, parts=parts)
    call(module, [3, 11], torch.tensor([[1.0] * 4, [2.0] * 4]))
    streamer.flush()
    assert compare_with_store(streamer.tables, store.address, only_present=True).is_equal
    assert streamer.fetch("a", torch.tensor([3])).weights.tolist() == [[1.0] * 4 + [2.0] * 4]


def test_names_beside_the_tables_are_told(streamer: RawEmbeddingStreamer, caplog: pytest.LogCaptureFixture) -> None:
    """A name in the allow-list that no table has is said in one line, with the nearest, where another one is right."""
    module = make_module([(8, 4), (8, 4)], table_names=["users", "films"], table_offsets=[0, 0])
    install(module, streamer, enabled_tables=["users", "flims"])
    assert "no table here matches 'flims'; the nearest is 'films'" in caplog.text
    assert len([record for record in caplog.records if record.name.endswith("res_stand_in")]) == 1


def test_tables_in_each_others_place_are_refused(streamer: RawEmbeddingStreamer) -> None:
    """Column shards without `parts`, and parts that overlap: both would write the same rows."""
    shards = make_module([(8, 4), (8, 4)], table_names=["c", "c"], table_offsets=[0, 0])
    original = shards._raw_embedding_streamer
    with pytest.raises(UnsupportedModelError, match=r"two tables are named 'c' .*install\(parts=...\)"):
        install(shards, streamer)
    assert shards._raw_embedding_streamer is original
    assert not streamer.tables
    parts = [TablePart(fqn="c", num_rows=16, dim=4, row_offset=offset) for offset in (0, 7)]
    with pytest.raises(UnsupportedModelError, match="two tables are named 'c'"):
        install(shards, streamer, parts=parts)
    assert not streamer.tables
    parts = [TablePart(fqn="c", num_rows=16, dim=4, row_offset=offset) for offset in (0, 8)]
    install(shards, streamer, parts=parts)
    assert len(streamer.tables) == 2


def test_parts_outside_of_the_table_are_refused(streamer: RawEmbeddingStreamer) -> None:
    """A negative offset, from RES or in a part, and a part that goes over the table's end are refused."""
    with pytest.raises(ConfigError, match="table 'a': rows -5:3 are not in its 3 rows"):
        install(make_module([(8, 4)], table_names=["a"], table_offsets=[-5]), streamer)
    for where, told in (
        ({"row_offset": 3}, "rows 3:11 are not in its 10 rows"),
        ({"column_offset": -1}, "columns -1:3 are not in its 8 columns"),
        ({"column_offset": 5}, "columns 5:9 are not in its 8 columns"),
    ):
        with pytest.raises(ConfigError, match=told):
            install(make_module([(8, 4)]), streamer, parts=[TablePart(fqn="a", num_rows=10, dim=8, **where)])
    assert not streamer.tables


def test_a_module_is_streamed_once(store: FakeStore, streamer: RawEmbeddingStreamer) -> None:
    """`install` and `attach` refuse a module that either of them streams, until that streamer is closed."""
    module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
    model = torch.nn.ModuleDict({"m": module})
    original = module._raw_embedding_streamer
    with RawEmbeddingStreamer(store.address, run="other", **FAST) as other:
        for is_installed in (True, False):
            if is_installed:
                install(module, streamer, path="m")
            else:
                streamer.attach(model)
            for one in (streamer, other):
                with pytest.raises(UnsupportedModelError, match="module 'm' is streamed already"):
                    install(module, one, path="m")
                with pytest.raises(UnsupportedModelError, match="module 'm' is streamed already"):
                    one.attach(model)
            streamer.close(flush=False)
            assert module._raw_embedding_streamer is original
            streamer = RawEmbeddingStreamer(store.address, run="res", **FAST)
        assert not other.tables
    streamer.close()


def test_port_as_res_has_it(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a streamer the port of LOCAL_RES_PORT is taken; `close` gives the module its own object back."""
    monkeypatch.setenv("LOCAL_RES_PORT", store.address.rpartition(":")[2])
    module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
    original = module._raw_embedding_streamer
    streamer = install(module, run="port")
    call(module, [1], torch.ones(1, 4))
    streamer.close()
    assert module._raw_embedding_streamer is original
    monkeypatch.delenv("LOCAL_RES_PORT")
    with pytest.raises(ConfigError, match="LOCAL_RES_PORT"):
        install(make_module([(8, 4)], table_names=["a"], table_offsets=[0]))


def test_wrong_calls(streamer: RawEmbeddingStreamer) -> None:
    """A module without RES, settings that do not fit, and rows beyond the tables are refused."""
    plain = ops.SplitTableBatchedEmbeddingBagsCodegen([(8, 4, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)])
    with pytest.raises(UnsupportedModelError, match="enable_raw_embedding_streaming"):
        install(plain, streamer)
    with pytest.raises(ConfigError, match="1 table_names and 2 table_offsets"):
        install(make_module([(8, 4)], table_names=["a"], table_offsets=[0, 0]), streamer)
    module = make_module([(8, 4)], table_names=["a"], table_offsets=[0])
    install(module, streamer)
    with pytest.raises(RowRangeError, match="row 8 of all tables' 8 rows"):
        call(module, [8], torch.ones(1, 4))
    assert not streamer.stats().num_dirty_rows
