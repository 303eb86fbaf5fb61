"""What a replica's process answers over the wire, compared with its server, and what it refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_trainer import DenseTrainer, dense_specs
from hellos import hello_of_nobody, hello_of_writer
from replica_answers import HALF, IDS, OTHER, SPEC, STATE, WAIT_S, call, connected, told, values, write
from replica_endpoint import Endpoint, get, replica_endpoint
from set_embeddings import delta_of, request_of
from stored_rows import read_rows
from watched_server import wait_until

from headrace.paramserver.reading.dense_parts import DensePart
from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import (
    ConfigError,
    HeadraceError,
    ProtocolMismatchError,
    RequestError,
    RowRangeError,
    UnauthorizedError,
    UnknownTableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.table_names import path_of
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.streamer.restore import restore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("server") / "data") as running:
        write(running, 1, deleted=np.array([1, 3]))
        yield running


@pytest.fixture(scope="module")
def endpoint(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("replica")
    with replica_endpoint(folder, server.address, "--max-frame-bytes=64KiB", "--max-client-bytes=256KiB") as running:
        yield running


def test_a_reader_of_the_server_reads_from_a_replica(server: ServerProcess, endpoint: Endpoint) -> None:
    """A client gets the same bytes from both, for any order, repeats and missing rows."""
    ids = np.concatenate([np.arange(999, -1, -1), [4, 4, 4]])
    mine, theirs = read_rows(endpoint.address, SPEC.fqn, ids), read_rows(server.address, SPEC.fqn, ids)
    assert mine.weights.tobytes() == theirs.weights.tobytes()
    assert mine.presence.tolist() == theirs.presence.tolist()
    assert set(theirs.presence) == {0, 1}
    half = read_rows(endpoint.address, HALF.fqn, np.arange(50))
    assert half.weights.dtype == np.uint16
    assert half.weights.tobytes() == read_rows(server.address, HALF.fqn, np.arange(50)).weights.tobytes()
    assert read_rows(endpoint.address, SPEC.fqn, []).weights.shape == (0, 3)


def test_a_trainer_is_not_restored_from_a_replica(endpoint: Endpoint) -> None:
    """The error is about the address, not about the model, which the replica cannot know."""
    model = torch.nn.ModuleDict({"other": torch.nn.Embedding(5, 2)})
    with pytest.raises(ConfigError, match=f"{endpoint.address} is the address of a replica"):
        restore(model, torch.optim.SGD(model.parameters(), lr=0.1), endpoint.address)


def test_runtime_meta_is_read_as_a_state(tmp_path: Path) -> None:
    """Of the states a replica's process has runtime meta alone: `with_states` returns what the server has."""
    meta = StateSpec(name="runtime_meta", kind=StateKind.ROWWISE, dtype=DType.INT64, width=2)
    spec = dataclasses.replace(SPEC, states=(STATE, meta))
    ids = np.array([4, 1, 4, 998], np.int64)

    async def send(address: str) -> None:
        async with await connected(address) as client:
            await client.hello(hello_of_writer(spec), timeout_s=WAIT_S)
            numbers = np.arange(2 * IDS.size, dtype=np.int64).reshape(-1, 2) - 9
            states = {STATE.name: np.ones((IDS.size, 1), np.float32), meta.name: numbers}
            delta = delta_of(spec, IDS, values(1), identities=IDS + 7, states=states)
            batch = request_of(delta, client_seq=1, ends_step=True, time_us=time.time_ns() // 1000)
            await client.set_embeddings(batch, timeout_s=WAIT_S)

    async def read(address: str) -> Rows:
        async with await EmbeddingReader.connect(address, timeout_s=WAIT_S) as reader:
            return await reader.get(spec.fqn, ids, with_states=True)

    with ServerProcess.start(tmp_path / "data") as server:
        asyncio.run(send(server.address))
        with replica_endpoint(tmp_path, server.address) as replica:
            mine, theirs = asyncio.run(read(replica.address)), asyncio.run(read(server.address))
    assert mine.states.keys() == {meta.name}
    assert (
        mine.states[meta.name].tolist() == theirs.states[meta.name].tolist() == [[-5, -4], [0, 0], [-5, -4], [989, 990]]
    )
    assert mine.weights.tobytes() == theirs.weights.tobytes()


@pytest.mark.parametrize("consistency", ["latest", "step"])
def test_the_dense_part_is_served_as_rows(tmp_path: Path, consistency: str) -> None:
    """A reader gets every tensor of the trainer's newest part bit for bit, in several replies, and rows of its step."""

    async def read(address: str) -> DensePart:
        async with await EmbeddingReader.connect(address) as reader:
            return await reader.dense(timeout_s=WAIT_S)

    specs = [*dense_specs(state="momentum1"), *dense_specs(shapes={"big.weight": ((300, 101), DType.FLOAT32)})]
    with (
        ServerProcess.start(tmp_path / "data", shards=2) as server,
        DenseTrainer(server.address, specs=specs) as trainer,
    ):
        trainer.publish(1)
        settings = (f"--consistency={consistency}", "--max-frame-bytes=64KiB", "--max-client-bytes=256KiB")
        with replica_endpoint(tmp_path / "replica", server.address, *settings) as endpoint:
            for step in (1, 5):
                trainer.publish(step)
                wait_until(lambda step=step: asyncio.run(read(endpoint.address)).step == step, "the part")
                part = asyncio.run(read(endpoint.address))
                assert (part.epoch, part.tensors.keys()) == (1, trainer.tensors(step).keys())
                for path, tensor in trainer.tensors(step).items():
                    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
                    assert part.tensors[path].tobytes() == bits.numpy().tobytes(), path
            (table,), bias = trainer.tables, trainer.specs[1]
            one = np.zeros(1, np.int64).tobytes()
            found = call(endpoint.address, "get_embeddings", request(table, one, more=[wanted(bias, one)]))
            assert np.frombuffer(found.weights, "<f4").tolist() == [5.0] * table.dim
            (more,) = found.more
            assert more.weights == bits_of_rows(trainer, bias)
            (dense,) = [s for s in call(endpoint.address, "status").tables if s.spec.fqn == bias.fqn]
            assert (dense.spec.shape, dense.spec.states) == ([50], [])
            with pytest.raises(RequestError, match="is a replica, which keeps no optimizer states"):
                call(endpoint.address, "get_embeddings", request(bias, one, with_states=True))
            with pytest.raises(RequestError, match="is a replica, which returns no versions of rows"):
                asked = request(bias, one, with_versions=True, more=[wanted(table, one)])
                call(endpoint.address, "get_embeddings", asked)


def bits_of_rows(trainer: DenseTrainer, spec: TableSpec) -> bytes:
    """Return row 0 of a bfloat16 tensor as it travels, zeros behind its last element."""
    bits = trainer.tensors(5)[path_of(spec.fqn)].view(torch.int16).numpy().tobytes()
    return bits.ljust(spec.dim * 2, b"\0")[: spec.dim * 2]


def test_without_an_interval_there_are_no_audits(endpoint: Endpoint) -> None:
    """Neither the wire nor the metrics mention audits."""
    assert told(endpoint.address).replica.audit is None
    assert "headrace_replica_audit" not in get(endpoint.health, "/metrics")[1]


def test_a_long_read_comes_in_chunks(endpoint: Endpoint) -> None:
    """A reader splits what does not fit the replica's frames."""
    ids = np.tile(np.arange(1000), 20)
    assert read_rows(endpoint.address, SPEC.fqn, ids).weights.nbytes > 2 * 2**16


def test_one_request_reads_several_tables(server: ServerProcess, endpoint: Endpoint) -> None:
    """`more` has the rows of further tables in order, as the server answers."""
    ids = np.array([4, 1, 4, 998], np.int64)
    more = [wanted(HALF, ids[:2].tobytes()), wanted(SPEC, b""), wanted(SPEC, bytes(8))]
    asked = request(SPEC, ids.tobytes(), more=more)
    mine, theirs = (call(address, "get_embeddings", asked) for address in (endpoint.address, server.address))
    assert [bytes(part.weights) for part in (mine, *mine.more)] == [bytes(p.weights) for p in (theirs, *theirs.more)]
    assert [list(part.presence) for part in (mine, *mine.more)] == [[1, 0, 1, 1], [0, 1], [], [1]]
    assert call(endpoint.address, "get_embeddings", request(SPEC, b"")).more is None
    assert call(endpoint.address, "get_embeddings", request(SPEC, b"", more=[])).more == []


def wanted(spec: TableSpec, row_ids: bytes) -> Any:
    return idl.RowsWanted(fqn=spec.fqn, row_ids=row_ids)


def request(spec: TableSpec, row_ids: bytes, **options: Any) -> Any:
    fields = {"with_states": False, "with_versions": False, **options}
    return idl.GetEmbeddingsRequest(fqn=spec.fqn, row_ids=row_ids, **fields)


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        (request(SPEC, b"", with_states=True), RequestError, "is a replica, which keeps no optimizer states"),
        (request(SPEC, b"", with_versions=True), RequestError, "is a replica, which returns no versions of rows"),
        (request(SPEC, b"1234567"), RequestError, "7 bytes of row ids are not a multiple of 8"),
        (request(SPEC, np.array([1000]).tobytes()), RowRangeError, r"row id 1000 is not in 0\.\.999"),
        (request(SPEC, np.array([-1]).tobytes()), RowRangeError, "row id -1"),
        (request(SPEC, bytes(8 * 6000)), RequestError, "6000 rows of 13 bytes are too long for one reply"),
        (request(SPEC, b"", more=[wanted(HALF, b"123")]), RequestError, "3 bytes of row ids are not a multiple of 8"),
        (request(SPEC, b"", more=[wanted(OTHER, b"")]), UnknownTableError, "no table 'no.such'"),
        (request(SPEC, b"", more=[wanted(SPEC, b"")] * 1024), RequestError, "rows of 1025 tables with one request"),
        (
            request(SPEC, bytes(8 * 4000), more=[wanted(SPEC, bytes(8 * 800))]),
            RequestError,
            "800 rows of 13 bytes are too long for one reply; ask for 721 at a time",
        ),
        (
            request(OTHER, b""),
            UnknownTableError,
            "no table 'no.such' in this replica; there are 'item.weight', 'user.weight'",
        ),
    ],
)
def test_what_cannot_be_answered(endpoint: Endpoint, asked: Any, kind: type[HeadraceError], words: str) -> None:
    """Each is a clear error, and the connection stays usable."""
    with pytest.raises(kind, match=words):
        call(endpoint.address, "get_embeddings", asked)


def test_rows_are_found_by_identity(endpoint: Endpoint) -> None:
    """`findRows` answers with rows, -1 for none; a table without identities and half an id are errors."""

    def find(address: str, fqn: str, data: bytes) -> Any:
        return call(address, "find_rows", idl.FindRowsRequest(fqn=fqn, identities=data))

    ids = np.array([7, 9, 11, 8, -1, 1005], np.int64).tobytes()
    found = find(endpoint.address, SPEC.fqn, ids)
    assert np.frombuffer(found.row_ids, np.int64).tolist() == [0, 2, 4, -1, -1, 998]
    for fqn, data, words in (
        (HALF.fqn, ids, "has no identities"),
        (SPEC.fqn, b"123", "3 bytes of identities"),
        (SPEC.fqn, bytes(8 * 8000), "8000 identities are too many for one reply"),
    ):
        with pytest.raises(RequestError, match=words):
            find(endpoint.address, fqn, data)


def digest_request(spec: TableSpec, **options: Any) -> Any:
    fields = {"first_row": 0, "end_row": 2**63 - 1, "column_offset": 0, "width": spec.dim, "max_buckets": 9}
    flags = {"with_presence": True, "only_weights": True}
    return idl.DigestRowsRequest(fqn=spec.fqn, **fields | flags | options)


@pytest.mark.parametrize("spec", [SPEC, HALF])
def test_digests_of_weights_are_the_servers(server: ServerProcess, endpoint: Endpoint, spec: TableSpec) -> None:
    """Digests by bucket equal the server's, with presence, for whole tables and parts."""
    for span in ({}, {"first_row": 1, "end_row": 40}, {"first_row": 3, "end_row": 4}, {"with_presence": False}):
        asked = digest_request(spec, **span)
        mine, theirs = (call(address, "digest_rows", asked) for address in (endpoint.address, server.address))
        assert (bytes(mine.buckets), bytes(mine.digests)) == (bytes(theirs.buckets), bytes(theirs.digests))
        assert (bytes(mine.counts), mine.presence) == (bytes(theirs.counts), theirs.presence)
        assert (mine.next_row, mine.seq) == (min(span.get("end_row", spec.num_rows), spec.num_rows), theirs.seq)
    assert np.frombuffer(mine.counts, "<i8").sum() == (IDS.size if spec is SPEC else 4)


def test_digests_of_what_a_replica_has_not_are_refused(endpoint: Endpoint) -> None:
    """Digests of states, of some columns, of wrong ranges and of unknown tables are refused."""
    for error, spec, options, words in (
        (RequestError, SPEC, {"only_weights": None}, "keeps no optimizer states; give"),
        (RequestError, SPEC, {"width": 2}, "digests whole rows, of 3 columns"),
        (RequestError, SPEC, {"column_offset": 1}, "digests whole rows"),
        (RequestError, SPEC, {"first_row": -1}, "rows from -1 on in 9 buckets: out of range"),
        (RequestError, SPEC, {"max_buckets": 0}, "in 0 buckets: out of range"),
        (UnknownTableError, OTHER, {}, "no table 'no.such' in this replica"),
    ):
        with pytest.raises(error, match=words):
            call(endpoint.address, "digest_rows", digest_request(spec, **options))


def test_only_readers_are_greeted(endpoint: Endpoint) -> None:
    """Trainers, administrators and other protocol versions are refused with the reason."""
    for role, name in ((idl.Role.WRITER, "writer"), (idl.Role.ADMIN, "admin")):
        with pytest.raises(
            UnauthorizedError, match=f"{endpoint.address} is a replica: it answers readers, and you say hello as {name}"
        ):
            call(endpoint.address, "", greeting=hello_of_nobody(role))
    with pytest.raises(ProtocolMismatchError, match="speaks protocol version 2, the client 9"):
        call(endpoint.address, "", greeting=hello_of_nobody(protocol_version=9))
    with pytest.raises(UnauthorizedError):
        call(endpoint.address, "set_embeddings", request_of())


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("fetch_updates", {"server_id": "s", "from_seq": 1, "wait_ms": 0, "max_bytes": 1}),
        ("create_snapshot", {"name": "one", "epoch": 0, "min_step": -1, "wait_ms": 0}),
        ("finish_snapshot", {"name": "one"}),
        ("fetch_snapshot", {"name": "one", "path": "", "offset": 0, "max_bytes": 1}),
        ("expire_rows", {"fqn": "", "is_dry_run": True, "wait_ms": 0}),
    ],
)
async def test_what_only_a_server_does_is_refused(endpoint: Endpoint, method: str, fields: dict[str, Any]) -> None:
    """Server methods are refused with the reason, not as unknown methods."""
    kind = getattr(idl, f"{method.title().replace('_', '')}Request")
    async with await connected(endpoint.address) as client:
        with pytest.raises(UnauthorizedError, match=rf"^{endpoint.address} is a replica, and [a-zA-Z]+ is for the"):
            await getattr(client, method)(kind(**fields), timeout_s=WAIT_S)


def test_hello_shows_a_server_of_one_shard(server: ServerProcess, endpoint: Endpoint) -> None:
    """The shard map is the replica itself, and tables lack what it does not keep."""
    mine, theirs = call(endpoint.address, ""), call(server.address, "")
    assert mine.server_id == theirs.server_id
    assert [(s.shard, f"{s.host}:{s.port}") for s in mine.shards] == [(0, endpoint.address)]
    assert {(t.fqn, t.num_rows, t.dim, len(t.states), t.has_identities) for t in mine.tables} == {
        (SPEC.fqn, 1000, 3, 0, False),
        (HALF.fqn, 50, 2, 0, False),
    }
